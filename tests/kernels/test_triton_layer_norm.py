"""The layer-norm kernels against torch in float64, gradients included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from autoshard.errors import KernelError
from autoshard.kernels import launch, triton_norm
from autoshard.kernels.triton_layer_norm import layer_norm, layer_norm_backward

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


def _check_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Forward, statistics and all gradients of layer norm over the last dim."""
    shape = [x.shape[-1]]
    out, mean, rstd = layer_norm(x, shape, weight, bias, EPS)
    wide = _wide(x, weight, bias)
    expected = F.layer_norm(wide[0], shape, wide[1], wide[2], EPS)
    _assert_close(out, expected.detach(), x.dtype)
    torch.testing.assert_close(mean.double(), x.double().mean(-1, keepdim=True), rtol=1e-5, atol=1e-5)
    grad_out = _draw(*x.shape, dtype=x.dtype)
    grads = layer_norm_backward(grad_out, x, shape, mean, rstd, weight, bias, [True, True, True])
    for actual, wanted in zip(grads, _gradients(expected, wide, grad_out), strict=True):
        _assert_close(actual, wanted, x.dtype)


@given(st.integers(1, 35), st.integers(2, 41), dtypes, st.booleans(), st.booleans())
def test_layer_norm(rows: int, columns: int, dtype: torch.dtype, has_weight: bool, has_bias: bool) -> None:
    """Layer norm equals torch's at odd sizes, with and without weight and bias."""
    weight = _draw(columns, dtype=dtype) if has_weight else None
    bias = _draw(columns, dtype=dtype) if has_bias else None
    _check_layer_norm(_draw(rows, columns, dtype=dtype), weight, bias)


def test_strided_inputs_of_many_dims() -> None:
    """Inputs with gaps between rows, and transposed ones, are read right."""
    x = _draw(3, 4, 16, dtype=torch.float32)[:, 1:, 3:12]
    weight, bias = _draw(18, dtype=torch.float32)[::2], _draw(9, dtype=torch.float32)
    for view in (x, x.transpose(0, 1), x.transpose(1, 2).contiguous().transpose(1, 2)):
        _check_layer_norm(view, weight, bias)


def test_many_rows_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight gradients are whole when each program walks several blocks of rows."""
    monkeypatch.setattr(triton_norm, "SUMMING_PROGRAMS", 2)
    x, weight = _draw(83, 7, dtype=torch.float32), _draw(7, dtype=torch.float32)
    assert launch.row_tile(7).rows * 2 < 83
    _check_layer_norm(x, weight, weight.clone())


def test_norm_over_several_dims() -> None:
    """`normalized_shape` may span several dims; the statistics keep them as ones, as ATen's do."""
    x, weight = _draw(2, 3, 5, dtype=torch.float32), _draw(3, 5, dtype=torch.float32)
    out, mean, rstd = layer_norm(x, [3, 5], weight, None, EPS)
    assert mean.shape == rstd.shape == (2, 1, 1)
    torch.testing.assert_close(out, F.layer_norm(x, [3, 5], weight, None, EPS), rtol=1e-5, atol=1e-5)


def test_output_mask_leaves_out_gradients() -> None:
    """Gradients that are not asked for are None."""
    x, weight = _draw(3, 5, dtype=torch.float32), _draw(5, dtype=torch.float32)
    _, mean, rstd = layer_norm(x, [5], weight, weight, EPS)
    grads = layer_norm_backward(x, x, [5], mean, rstd, weight, weight, [False, True, False])
    assert [grad is None for grad in grads] == [True, False, True]


def test_large_mean_does_not_cancel() -> None:
    """The variance is taken about the mean: a large offset costs no precision beyond the input's."""
    x = torch.randn(4, 33, device=DEVICE) + 1000.0
    out = layer_norm(x, [33], None, None, EPS)[0]
    expected = F.layer_norm(x.double(), [33], None, None, EPS)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


def test_too_long_rows_are_refused() -> None:
    """Rows longer than a program holds are refused by name."""
    x = torch.zeros(1, 20000, device=DEVICE)
    with pytest.raises(KernelError, match=r"triton_layer_norm does not apply: a row has 20000 elements"):
        layer_norm(x, [20000], None, None, EPS)
