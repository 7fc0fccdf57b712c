"""`find_ranges` finds ranges that contain all values of a program."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from autoshard.rules.linearity import Range
from autoshard.rules.ranges import ANYTHING, find_ranges, range_of_type
from autoshard.testing import programs
from autoshard.testing.one_device import OneDevice
from autoshard.testing.programs import DrawnProgram
from autoshard.tracing import trace

NUMBERS = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30, 3.0, -1.0)


class _Watch(OneDevice):
    """Runs a program on one device, and notes values outside of their ranges."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.ranges = find_ranges(graph_module)
        self.outside: list[str] = []

    def run_node(self, n: fx.Node) -> object:
        """Run a node, note its value if the value is outside of the node's range, and return the value."""
        value = super().run_node(n)
        found = self.ranges[n]
        if isinstance(value, Tensor) and not value.is_complex() and value.numel():
            numbers = value[~value.isnan()].double()
            low, high = found.low - _rounding(found.low), found.high + _rounding(found.high)
            if numbers.numel() and not (low <= numbers.min() and numbers.max() <= high):
                self.outside.append(f"{n.format_node()}: {found}, {numbers.min()} to {numbers.max()}")
            if found.excludes_zero and bool((numbers == 0).any()):
                self.outside.append(f"{n.format_node()}: {found} has a zero")
        return value


def _rounding(bound: float) -> float:
    return abs(bound) * 1e-5 if math.isfinite(bound) else 0.0


def watch(model: nn.Module, inputs: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> list[str]:
    """Describe the values outside of their ranges when the traced program runs on `values`."""
    program = trace(model, inputs)
    run = _Watch(program.graph_module)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given = dict(zip((slot.name for slot in program.inputs if slot.kind == "input"), values, strict=True))
    nodes = program.nodes_by_name()

    def value_of(name: str, node: str) -> Tensor:
        known = given.get(name, state.get(name))
        shape = nodes[node].meta["val"]
        return torch.ones(shape.shape, dtype=shape.dtype) if known is None else known.detach()

    run.run(*(value_of(slot.name, slot.node) for slot in program.inputs))
    return run.outside


class Written(nn.Module):
    """Norms, gates and counts written by hand."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        count = mask.sum().clamp(min=1)
        gate = torch.softmax(x, -1).topk(2, -1).values * 2.5
        deviation = (x.var(-1, keepdim=True) + 1e-5).sqrt()
        normal = (x - x.mean(-1, keepdim=True)) / deviation
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        kept = torch.where(mask, torch.tanh(x), torch.full_like(x, 2.0))
        return normal.sum() / count, gate, scale, kept.abs().exp(), torch.cat([kept, -kept]).square(), 1.0 / count


@settings(max_examples=15, deadline=None)
@given(numbers=st.lists(st.sampled_from(NUMBERS) | st.floats(width=32), min_size=8, max_size=8), seed=st.integers(0, 9))
def test_no_value_lies_outside_of_its_range(numbers: list[float], seed: int) -> None:
    """No value lies outside of its range, for inputs with zeros, infinities and NaN."""
    torch.manual_seed(seed)
    x, mask = torch.randn(4, 8), torch.rand(4, 8) < 0.3
    values = x.clone()
    values[seed % 4] = torch.tensor(numbers, dtype=torch.float32)
    assert watch(Written(), (x, mask), (values, mask)) == []


@settings(max_examples=6, deadline=None)
@given(program=programs(max_blocks=2))
def test_no_value_of_a_drawn_program_lies_outside_of_its_range(program: DrawnProgram) -> None:
    """No value of a drawn program's forward and backward lies outside of its range."""
    program.model.eval()
    assert watch(program.model, program.inputs, program.inputs) == []


class NormedInTurn(nn.Module):
    """A drawn program whose batch norm of a transposed value has another layout than its trace."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8, affine=False, track_running_stats=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2)).mean()


class SquareLessANumber(nn.Module):
    """A drawn program that subtracts a number from a possible infinity."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.mse_loss(x + (x * x - 0.5), target)


@pytest.mark.parametrize(("model", "count"), [(NormedInTurn(), 1), (SquareLessANumber(), 2)])
def test_no_value_of_programs_that_were_drawn_lies_outside_of_its_range(model: nn.Module, count: int) -> None:
    """No value lies outside of its range in two drawn programs that once failed."""
    inputs = tuple(torch.randn(count, 4, 4, 8))
    assert watch(model, inputs, inputs) == []


def found(build: Callable[[Tensor, Tensor], Tensor]) -> Range:
    """Return the range of an expression of a float input `x` and an integer input `n`."""

    class Built(nn.Module):
        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            return build(x, n)

    program = trace(Built(), (torch.randn(4, 4), torch.arange(4)))
    return find_ranges(program.graph_module)[program.nodes_by_name()[program.outputs[0].node]]


@pytest.mark.parametrize(
    ("build", "finite", "not_zero"),
    [
        (lambda x, n: x * 2, False, False),
        (lambda x, n: x.sigmoid(), True, False),
        (lambda x, n: (x.softmax(-1) * 3).transpose(0, 1)[0], True, False),
        (lambda x, n: x.var(-1) + 1e-5, False, True),
        (lambda x, n: (x.var(-1) + 1e-5).rsqrt(), True, False),
        (lambda x, n: (n > 1).sum().clamp(min=1).float(), True, True),
        (lambda x, n: n.float() + 0.5, True, False),
        (lambda x, n: x.tanh().exp(), True, True),
        (lambda x, n: x.exp(), False, False),
        (lambda x, n: x.var(-1) - 1e-5, False, False),
        (lambda x, n: 0.5 - x.square(), False, False),
        (lambda x, n: 1 / x.tanh(), False, False),
        (lambda x, n: torch.where(n > 1, x.tanh(), -math.inf), False, False),
        (lambda x, n: torch.ones(4) / 0.0, False, False),
        (lambda x, n: x.tanh() * 1e38 * 1e38, False, False),
        (lambda x, n: (x.sigmoid() + 0.1) * 1e-38 * 1e-38, True, False),
        (lambda x, n: (x.sigmoid() + 1.0) - 0.9999999999, True, False),
        (lambda x, n: x.nan_to_num(), True, False),
    ],
)
def test_what_is_known_follows_from_how_a_value_was_made(
    build: Callable[[Tensor, Tensor], Tensor], finite: bool, not_zero: bool
) -> None:
    """The range of an expression is finite, or excludes zero, as far as its operators and their operands allow.

    Products that may overflow and masks with infinities are not finite. Sums that may cancel do not exclude zero.
    """
    range_ = found(build)
    assert (range_.is_finite, range_.excludes_zero) == (finite, not_zero)


def test_numbers_of_a_type() -> None:
    """The range of a float type is unbounded; integers and booleans have the limits of their type."""
    assert range_of_type(torch.float32) == ANYTHING
    assert range_of_type(torch.int8) == Range(-128, 127)
    assert range_of_type(torch.bool) == Range(0, 1)
