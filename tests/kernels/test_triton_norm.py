"""The layer-norm and RMS-norm kernels equal torch in float64, gradients included."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from autoshard.errors import KernelError
from autoshard.kernels import launch, triton_norm
from autoshard.kernels.triton_norms import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from tests.kernels.fused import DEVICE, dtypes, wide

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")

# Large, so that rows of two nearly equal elements are well conditioned.
EPS = 0.1
Parameters = Sequence[Tensor | None]
"""Weight and bias of a layer norm, the weight of an RMS norm."""


def _draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.randn(shape, device=DEVICE) + 1).to(dtype)


def _forward(x: Tensor, shape: list[int], parameters: Parameters) -> tuple[Tensor, ...]:
    return (layer_norm if len(parameters) == 2 else rms_norm)(x, shape, *parameters, EPS)


def _backward(
    grad: Tensor, x: Tensor, shape: list[int], statistics: Sequence[Tensor], parameters: Parameters, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    kernel = layer_norm_backward if len(parameters) == 2 else rms_norm_backward
    return kernel(grad, x, shape, *statistics, *parameters, mask)


def _torchs(x: Tensor, shape: list[int], parameters: Parameters) -> Tensor:
    return (F.layer_norm if len(parameters) == 2 else F.rms_norm)(x, shape, *parameters, eps=EPS)


def _assert_close(actual: Tensor | None, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual is not None
    assert actual.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=2 * eps, atol=max(4 * eps, 2e-5))


def _check(x: Tensor, parameters: Parameters) -> None:
    """Output, mean and all gradients of a norm over the last dim equal torch's in float64."""
    shape, operands = [x.shape[-1]], [x, *parameters]
    out, *statistics = _forward(x, shape, parameters)
    exact = [None if item is None else wide(item).requires_grad_() for item in operands]
    expected = _torchs(exact[0], shape, exact[1:])
    _assert_close(out, expected.detach(), x.dtype)
    if len(parameters) == 2:
        torch.testing.assert_close(statistics[0].double(), x.double().mean(-1, keepdim=True), rtol=1e-5, atol=1e-5)
    grad_out = _draw(*x.shape, dtype=x.dtype)
    grads = _backward(grad_out, x, shape, statistics, parameters, [True] * len(operands))
    asked = [index for index, item in enumerate(exact) if item is not None]
    wanted = dict(
        zip(asked, torch.autograd.grad(expected, [exact[index] for index in asked], grad_out.double()), strict=True)
    )
    for index, actual in enumerate(grads):
        if index in wanted:
            _assert_close(actual, wanted[index], x.dtype)
        else:
            assert actual is None


@pytest.mark.parametrize("count", [1, 2], ids=["rms", "layer"])
@given(st.integers(1, 35), st.integers(2, 41), dtypes, st.lists(st.booleans(), min_size=2, max_size=2))
def test_equals_torch(count: int, rows: int, columns: int, dtype: torch.dtype, given: list[bool]) -> None:
    """Results equal torch's at odd sizes, with and without weight and bias."""
    parameters = [_draw(columns, dtype=dtype) if is_given else None for is_given in given[:count]]
    _check(_draw(rows, columns, dtype=dtype), parameters)


@pytest.mark.parametrize("count", [1, 2], ids=["rms", "layer"])
def test_strided_inputs_of_many_dims(count: int) -> None:
    """Inputs with gaps between rows, and transposed inputs, give torch's results."""
    x = _draw(3, 4, 16)[:, 1:, 3:12]
    parameters = [_draw(18)[::2], _draw(9)][:count]
    for view in (x, x.transpose(0, 1), x.transpose(1, 2).contiguous().transpose(1, 2)):
        _check(view, parameters)


@pytest.mark.parametrize("count", [1, 2], ids=["rms", "layer"])
def test_many_rows_per_program(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of weights and biases are right when each program goes over several blocks of rows."""
    monkeypatch.setattr(triton_norm, "SUMMING_PROGRAMS", 2)
    assert launch.row_tile(7).rows * 2 < 83
    _check(_draw(83, 7), [_draw(7) for _ in range(count)])


@pytest.mark.parametrize("count", [1, 2], ids=["rms", "layer"])
def test_norm_over_several_dims(count: int) -> None:
    """`normalized_shape` may span several dims, and the statistics have size 1 in these, like ATen's."""
    x, parameters = _draw(2, 3, 5), [_draw(3, 5), None][:count]
    out, *statistics = _forward(x, [3, 5], parameters)
    assert all(item.shape == (2, 1, 1) for item in statistics)
    torch.testing.assert_close(out, _torchs(x, [3, 5], parameters), rtol=1e-5, atol=1e-5)


def test_without_eps_an_rms_norm_takes_float32s() -> None:
    """With eps None, the result equals that of torch, which takes the eps of float32."""
    x, weight = _draw(2, 3, 5), _draw(3, 5)
    torch.testing.assert_close(rms_norm(x, [3, 5], weight, None)[0], F.rms_norm(x, [3, 5], weight))


@pytest.mark.parametrize("mask", [[True, False], [False, True], [False, True, False]])
def test_output_mask_leaves_out_gradients(mask: list[bool]) -> None:
    """Gradients that the mask leaves out are None."""
    x, parameters = _draw(3, 5), [_draw(5) for _ in mask[1:]]
    _, *statistics = _forward(x, [5], parameters)
    grads = _backward(x, x, [5], statistics, parameters, mask)
    assert [grad is not None for grad in grads] == mask


def test_large_mean_does_not_cancel() -> None:
    """With a mean of 1000 the result equals float64's within 1e-3, because the variance is taken about the mean."""
    x = torch.randn(4, 33, device=DEVICE) + 1000.0
    expected = F.layer_norm(x.double(), [33], None, None, EPS)
    torch.testing.assert_close(layer_norm(x, [33], None, None, EPS)[0].double(), expected, rtol=1e-3, atol=1e-3)


def test_too_long_rows_are_refused() -> None:
    """Rows longer than a program holds are refused, and the error names the kernel and the length."""
    x = torch.zeros(1, 20000, device=DEVICE)
    with pytest.raises(KernelError, match=r"triton_layer_norm does not apply: a row has 20000 elements"):
        layer_norm(x, [20000], None, None, EPS)
