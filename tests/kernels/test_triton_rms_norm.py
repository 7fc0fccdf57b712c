"""The RMS-norm kernels against torch in float64, gradients included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from autoshard.kernels import launch, triton_norm
from autoshard.kernels.triton_rms_norm import rms_norm, rms_norm_backward

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Large, so that rows of two nearly equal elements are well conditioned.
EPS = 0.1
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def _draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return (2 * torch.randn(shape, device=DEVICE) + 1).to(dtype)


def _wide(*tensors: Tensor | None) -> list[Tensor | None]:
    """float64 copies that require grad."""
    return [None if x is None else x.double().requires_grad_() for x in tensors]


def _assert_close(actual: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    if expected is None:
        assert actual is None
        return
    assert actual is not None
    assert actual.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=2 * eps, atol=max(4 * eps, 2e-5))


def _gradients(out: Tensor, inputs: list[Tensor | None], grad_out: Tensor) -> list[Tensor | None]:
    wanted = [x for x in inputs if x is not None]
    grads = iter(torch.autograd.grad(out, wanted, grad_out.double()))
    return [None if x is None else next(grads) for x in inputs]


def _check_rms_norm(x: Tensor, weight: Tensor | None) -> None:
    """Forward and all gradients of RMS norm over the last dim."""
    shape = [x.shape[-1]]
    out, rstd = rms_norm(x, shape, weight, EPS)
    wide = _wide(x, weight)
    expected = F.rms_norm(wide[0], shape, wide[1], EPS)
    _assert_close(out, expected.detach(), x.dtype)
    grad_out = _draw(*x.shape, dtype=x.dtype)
    grads = rms_norm_backward(grad_out, x, shape, rstd, weight, [True, True])
    for actual, wanted in zip(grads, _gradients(expected, wide, grad_out), strict=True):
        _assert_close(actual, wanted, x.dtype)


@given(st.integers(1, 35), st.integers(1, 41), dtypes, st.booleans())
def test_rms_norm(rows: int, columns: int, dtype: torch.dtype, has_weight: bool) -> None:
    """RMS norm equals torch's at odd sizes, with and without weight."""
    weight = _draw(columns, dtype=dtype) if has_weight else None
    _check_rms_norm(_draw(rows, columns, dtype=dtype), weight)


def test_strided_inputs_of_many_dims() -> None:
    """Inputs with gaps between rows, and transposed ones, are read right."""
    x = _draw(3, 4, 16, dtype=torch.float32)[:, 1:, 3:12]
    weight = _draw(18, dtype=torch.float32)[::2]
    for view in (x, x.transpose(0, 1), x.transpose(1, 2).contiguous().transpose(1, 2)):
        _check_rms_norm(view, weight)


def test_many_rows_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight gradients are whole when each program walks several blocks of rows."""
    monkeypatch.setattr(triton_norm, "SUMMING_PROGRAMS", 2)
    assert launch.row_tile(7).rows * 2 < 83
    _check_rms_norm(_draw(83, 7, dtype=torch.float32), _draw(7, dtype=torch.float32))


def test_norm_over_several_dims() -> None:
    """`normalized_shape` may span several dims; without eps it is float32's, as in ATen."""
    x, weight = _draw(2, 3, 5, dtype=torch.float32), _draw(3, 5, dtype=torch.float32)
    out, rstd = rms_norm(x, [3, 5], weight, None)
    assert rstd.shape == (2, 1, 1)
    torch.testing.assert_close(out, F.rms_norm(x, [3, 5], weight), rtol=1e-5, atol=1e-5)


def test_output_mask_leaves_out_gradients() -> None:
    """Gradients that are not asked for are None."""
    x, weight = _draw(3, 5, dtype=torch.float32), _draw(5, dtype=torch.float32)
    rstd = rms_norm(x, [5], weight, EPS)[1]
    assert rms_norm_backward(x, x, [5], rstd, weight, [True, False])[1] is None
    assert rms_norm_backward(x, x, [5], rstd, weight, [False, True])[0] is None
