"""The table of kernels: each kernel has its operator's arguments and the shapes, dtypes and strides of its results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoshard.kernels.kernel import FusedKernel
from autoshard.kernels.launch import why_not
from autoshard.kernels.registry import FUSED, KERNELS, find_kernel

aten, autoshard = torch.ops.aten, torch.ops.autoshard


def _calls(device: str, dtype: torch.dtype = torch.float32) -> list[tuple[torch._ops.OpOverload, tuple]]:
    """Arguments of one call of every operator that has a kernel."""

    def x(*shape: int) -> Tensor:
        return torch.ones(shape, device=device, dtype=dtype)

    def statistic(*shape: int) -> Tensor:
        return torch.ones(shape, device=device)

    target = torch.zeros(4, dtype=torch.int64, device=device)
    seed = torch.zeros((), dtype=torch.int64, device=device)
    rows, weight, three = x(2, 4, 6), x(6), statistic(2, 4, 1)
    packed, scale = (torch.zeros(count, dtype=torch.uint8, device=device) for count in (32, 4))
    return [
        (aten.native_layer_norm.default, (rows, [6], weight, weight, 1e-5)),
        (
            aten.native_layer_norm_backward.default,
            (rows, rows, [6], three, three, weight, weight, [True, True, True]),
        ),
        (aten._fused_rms_norm.default, (rows, [6], weight, None)),
        (aten._fused_rms_norm_backward.default, (rows, rows, [6], three, weight, [True, True])),
        (autoshard.cross_entropy.default, (x(4, 6), target, -100, 0.1)),
        (
            autoshard.cross_entropy_backward.default,
            (statistic(4), x(4, 6), target, statistic(4), -100, 0.1),
        ),
        (autoshard.split_cross_entropy.default, (x(4, 6), statistic(4), target, target > 1, 0.9)),
        (
            autoshard.split_cross_entropy_backward.default,
            (x(4, 6), statistic(4), statistic(4), target, target > 1, target > 2, -0.9, 0.1),
        ),
        (autoshard.dropout.default, (rows, seed, 0.5, 1, [0, 0, 0], [2, 4, 6])),
        (autoshard.dequantize_nf4.default, (packed, scale, None, [4, 16], 64, 0, dtype)),
    ]


def _describe(results: Tensor | tuple[Tensor | None, ...]) -> list[tuple[object, ...] | None]:
    results = (results,) if isinstance(results, Tensor) else results
    return [None if x is None else (x.shape, x.dtype, x.stride()) for x in results]


@pytest.mark.parametrize("index", range(10))
def test_replacement_gives_the_operators_results(index: int) -> None:
    """On meta tensors a kernel gives its operator's shapes, dtypes and strides."""
    operator, arguments = _calls("meta")[index]
    kernel = find_kernel(operator, arguments)
    assert kernel is not None
    assert _describe(kernel(*arguments)) == _describe(operator(*arguments))


@pytest.mark.parametrize("index", range(10))
def test_replacement_takes_the_operators_arguments(index: int) -> None:
    """The arguments of a kernel's schema have its operator's names in the same order."""
    operator, _ = _calls("meta")[index]
    ours = [argument.name for argument in KERNELS[operator]._schema.arguments]
    assert ours == [argument.name for argument in operator._schema.arguments]


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs through the interpreter")
@pytest.mark.parametrize("index", range(10))
def test_opcheck(index: int) -> None:
    """Torch's checks of schema and fake tensors pass for each kernel."""
    operator, arguments = _calls("cpu")[index]
    torch.library.opcheck(KERNELS[operator], arguments, test_utils=("test_schema", "test_faketensor"))


def test_every_kernel_is_called_here() -> None:
    """`_calls` has a call for each operator of the table."""
    assert {operator for operator, _ in _calls("meta")} == set(KERNELS)


def _fused_calls() -> dict[torch._ops.OpOverload, tuple]:
    """Arguments of one call of every fused kernel."""
    x, statistic, row = torch.randn(2, 4, 6), torch.ones(2, 4, 1), torch.randn(6)
    q, k, angle = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
    total, index = torch.randn(4), torch.arange(4)
    head = torch.randn(4100, 6)
    return {
        autoshard.triton_add_rms_norm_backward.default: (x, x, x, statistic, row, [1, 1, 6]),
        autoshard.triton_add_layer_norm_backward.default: (x, x, x, statistic, statistic, row, row),
        autoshard.triton_add_rms_norm.default: (x, x, row, None),
        autoshard.triton_add_layer_norm.default: (x, x, row, row, 1e-5),
        autoshard.triton_bias_add_rms_norm.default: (x, row, x, row, None),
        autoshard.triton_bias_add_layer_norm.default: (x, row, x, row, row, 1e-5),
        autoshard.triton_rms_norm.default: (x, [6], row, None),
        autoshard.triton_gated_backward.default: (x, x, x, "silu"),
        autoshard.triton_gated.default: (x, x, "gelu"),
        autoshard.triton_bias_gelu_backward.default: (x, x, row, "gelu"),
        autoshard.triton_bias_gelu.default: (x, row, [8, 6], "gelu_tanh"),
        autoshard.triton_rotary.default: (q, k, angle, angle, False, True),
        autoshard.triton_linear_cross_entropy_backward.default: (total, x[0], head, index, total, -100, 0.1),
        autoshard.triton_linear_cross_entropy.default: (x[0], head, index, -100, 0.1),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs through the interpreter")
@pytest.mark.parametrize("kernel", FUSED, ids=lambda kernel: kernel.name)
def test_fused_opcheck(kernel: FusedKernel) -> None:
    """Each fused kernel takes these arguments, and torch's checks of schema and fake tensors pass."""
    arguments = _fused_calls()[kernel.operator]
    assert why_not(kernel.operator, *arguments) is None
    torch.library.opcheck(kernel.operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_float64_has_no_kernel_and_explains_why() -> None:
    """A kernel is not found for float64 operands, and gives a reason with the dtype. An operator without a kernel
    has None."""
    operator, arguments = aten._fused_rms_norm.default, (torch.ones(2, 3, dtype=torch.float64), [3], None, 1e-6)
    assert find_kernel(operator, arguments) is None
    assert str(why_not(KERNELS[operator], *arguments)).startswith("input has dtype torch.float64")
    assert find_kernel(aten.relu.default, arguments[:1]) is None
