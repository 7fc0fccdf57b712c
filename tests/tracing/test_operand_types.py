"""Operands of unlike types or integers that one device refuses are refused by name before planning."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard
from autoshard import Cluster, Mesh
from autoshard.errors import TraceError
from autoshard.tracing.operand_types import FLOATING
from autoshard.tracing.trace import trace

INTEGERS = torch.ones(4, 3, 8, dtype=torch.int64)

aten, ours = torch.ops.aten, torch.ops.autoshard

REFUSING: dict[object, Callable[[Tensor], Tensor]] = {
    aten.gelu.default: F.gelu,
    aten.silu.default: F.silu,
    aten.mish.default: F.mish,
    aten.hardswish.default: F.hardswish,
    aten.hardsigmoid.default: F.hardsigmoid,
    aten.softplus.default: F.softplus,
    aten.elu.default: F.elu,
    aten.glu.default: F.glu,
    aten.log_sigmoid_forward.default: F.logsigmoid,
    aten._softmax.default: lambda x: x.softmax(-1),
    aten._log_softmax.default: lambda x: x.log_softmax(-1),
    aten.var.correction: lambda x: x.var(),
    aten.std.correction: lambda x: x.std(),
    aten.var_mean.correction: lambda x: torch.var_mean(x, -1)[0],
    aten.lerp.Scalar: lambda x: torch.lerp(x, x, 0.5),
    aten.lerp.Tensor: lambda x: torch.lerp(x, x, x),
    ours.dropout.default: lambda x: F.dropout(x, 0.5),
    ours.attention.default: lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    ours.cross_entropy.default: lambda x: F.cross_entropy(x.flatten(0, 1), x[..., 0].long().flatten()),
}
"""The functions that run each refusing operator."""


class Called(nn.Module):
    """A model that applies a function to its input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Layers(nn.Module):
    """A model of two linear layers, with an optional cast of its input."""

    def __init__(self, cast: torch.dtype | None = None) -> None:
        super().__init__()
        self.wide, self.narrow, self.cast = nn.Linear(8, 16), nn.Linear(16, 4, bias=False), cast

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.cast is None else x.to(self.cast)
        return self.narrow(self.wide(x).relu()).square().mean()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float64])
def test_inputs_of_another_type_than_the_parameters_are_refused(dtype: torch.dtype) -> None:
    """The error names the input, the parameters, the module and the user's line."""
    x = INTEGERS.to(dtype)
    with pytest.raises(RuntimeError):
        Layers()(x)
    named = rf"of 'wide' at test_operand_types\.py:\d+ in forward takes .*input 'input:0' of {dtype}.*'wide.weight'"
    with pytest.raises(TraceError, match=named):
        trace(Layers(), (x,))


def test_products_of_one_type_are_traced() -> None:
    """Inputs that the model casts, and inputs in a float64 model's type, are traced."""
    trace(Layers(torch.float32), (INTEGERS,))
    trace(Layers().double(), (INTEGERS.double(),))


def test_values_of_unlike_types_are_refused_by_their_lines() -> None:
    """A computed operand of an unlike type is refused with the operator and line that made it."""

    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x + y) @ x.to(torch.float64).T

    with pytest.raises(
        TraceError,
        match=r"takes the result of aten\.add\.Tensor at test_operand_types\.py:\d+ in forward of torch\.float32 "
        r"and the result of aten\.permute\.default at test_operand_types\.py:\d+ in forward of torch\.float64",
    ):
        trace(Product(), (torch.ones(2, 2), torch.ones(2, 2)))


@pytest.mark.parametrize("operator", sorted(FLOATING, key=str), ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_are_refused_by_operators_of_floating_point_numbers(operator: object, dtype: torch.dtype) -> None:
    """Operators for floating-point numbers refuse integers in the trace, as one device does, and are
    traced for floats."""
    model = Called(REFUSING[operator])
    with pytest.raises(RuntimeError):
        model(INTEGERS.to(dtype))
    with pytest.raises(TraceError):
        trace(model, (INTEGERS.to(dtype),))
    program = trace(model, (torch.rand(INTEGERS.shape),))
    assert operator in {node.target for node in program.graph.nodes}


def test_they_are_refused_by_their_names() -> None:
    """An integer operand of gelu is refused, and the error names the input, its type, and a cast in the model."""
    named = (
        r"The operator aten\.gelu\.default at .* takes input 'input:0' of torch\.int64: .* floating point numbers only"
    )
    with pytest.raises(TraceError, match=rf"{named}.*cast in the model"):
        trace(Called(F.gelu), (INTEGERS,))


def test_convolutions_and_sums_by_index_take_one_type() -> None:
    """Sums by index and convolutions of integers with floats are refused, as one device does. A convolution of
    integers alone is traced."""
    weight, index = torch.ones(3, 3, 1), torch.tensor([0, 2, 2, 1])

    def added(x: Tensor) -> Tensor:
        return torch.zeros(4, 3, 8).index_add(0, index, x)

    def convolved(x: Tensor) -> Tensor:
        return F.conv1d(x, weight)

    for function in (added, convolved):
        with pytest.raises(RuntimeError):
            function(INTEGERS)
        with pytest.raises(TraceError, match=r"operator aten\.(index_add|convolution)\.default .* of unlike types"):
            trace(Called(function), (INTEGERS,))
        trace(Called(function), (INTEGERS.float(),))
    trace(Called(lambda x: F.conv1d(x, weight.long())), (INTEGERS,))


def test_integers_are_taken_where_one_device_takes_them() -> None:
    """Relu, dropout in evaluation, and a softmax with a float type take integers, as one device does."""
    for function in (F.relu, lambda x: x.softmax(-1, dtype=torch.float32), lambda x: F.dropout(x, training=False)):
        function(INTEGERS)
        trace(Called(function), (INTEGERS,))


def test_planning_compiling_and_pricing_refuse_alike() -> None:
    """Planning on a mesh, planning on a cluster, and compiling refuse integer inputs with the same error."""
    asked = {"example_inputs": (INTEGERS,), "optimizer": "adamw"}
    with pytest.raises(TraceError, match=r"matrix product .* of unlike types"):
        autoshard.plan(Layers(), Cluster("h100_sxm", 1, 2).mesh({"data": 2}), **asked)
    with pytest.raises(TraceError, match=r"matrix product .* of unlike types"):
        autoshard.plan(Layers(), Cluster("h100_sxm", 1, 2), global_batch=8, **asked)
    with pytest.raises(TraceError, match=r"matrix product .* of unlike types"):
        autoshard.compile(Layers(), Mesh({"data": 2}), example_inputs=(INTEGERS,))
