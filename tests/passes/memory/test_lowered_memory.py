"""The memory of lowered programs, compared with the search's own count."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import nn

from autoshard import Mesh
from autoshard.tracing import trace
from passes.driver.plan_of_choice import memory_of_choice
from passes.driver.plan_options import PlanOptions
from passes.memory.storages import ACTIVATIONS, GRADIENTS, PARAMETERS, PARTS, STATE
from tests.passes.blocks import blocks_program, peak_of, perceptron_program, problem_of
from tests.passes.drawn_choices import drawn_choice

LINE, SQUARE = Mesh({"x": 2}), Mesh({"x": 2, "y": 2})


@pytest.mark.parametrize("seed", range(3))
def test_the_count_of_a_search_is_near(seed: int) -> None:
    """The search's count of the peak is within 30 % of the lowered program's, also with optimizer state."""
    for program, ratio in ((blocks_program(count=2), 2.0), (perceptron_program(9), 0.0)):
        planning = problem_of(program, SQUARE, state_bytes_per_parameter_byte=ratio)
        choice = drawn_choice(planning, seed)
        assert planning.usage(choice).max() == pytest.approx(peak_of(planning, choice), rel=0.3)


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_add_up_to_the_peak(seed: int) -> None:
    """The parts of a drawn plan's memory sum to its peak."""
    planning = problem_of(blocks_program(count=3), Mesh({"data": 2, "model": 2}), state_bytes_per_parameter_byte=2.0)
    memory = memory_of_choice(planning, drawn_choice(planning, seed), PlanOptions())
    assert tuple(memory.parts) == PARTS
    assert sum(memory.parts.values()) == memory.peak_bytes
    assert memory.parts[STATE] == 2 * memory.parts[PARAMETERS]


def test_gradients_are_all_of_the_peak_that_grows_with_parameters_alone() -> None:
    """With a small batch, gradients are in memory at the peak.

    With a large batch, the peak comes earlier in the step.
    """
    small, large = (
        memory_of_choice(planning, [0] * len(planning.members), PlanOptions()).parts
        for planning in (
            problem_of(blocks_program(batch=batch, length=length), LINE) for batch, length in ((2, 1), (64, 64))
        )
    )
    assert small[GRADIENTS] > 0.5 * small[PARAMETERS]
    assert large[GRADIENTS] < small[GRADIENTS]
    assert small[ACTIVATIONS] < large[ACTIVATIONS]


def test_another_axis_on_a_spec_takes_no_more_of_parameters() -> None:
    """If a parameter's spec splits over a further axis, parameters take less memory."""
    planning = problem_of(blocks_program(count=1), SQUARE, state_bytes_per_parameter_byte=2.0)
    choice = drawn_choice(planning, 0)
    name = min(planning.liveness.parameters)
    variable = planning.classes[name]
    specs = [strategy.outputs[0] for strategy in planning.space.sites[name].strategies]
    choices = ([*choice[:variable], option, *choice[variable + 1 :]] for option in range(len(specs)))
    held = [memory_of_choice(planning, one, PlanOptions()).parts[PARAMETERS] for one in choices]
    pairs = [
        (one, two) for one, two in permutations(range(len(specs)), 2) if set(specs[one].axes) < set(specs[two].axes)
    ]
    assert pairs
    assert all(held[two] < held[one] for one, two in pairs)


class Offset(nn.Module):
    """Four layers, and a large table that is read twice. The table is a buffer or a plain tensor."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("table", torch.rand(512, 16))
        if not is_buffer:
            table = self.table
            del self.table
            self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.table[:8] * self.table.sum()
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.square().mean()


def test_a_constant_takes_as_much_memory_as_a_buffer() -> None:
    """A tensor that is no buffer takes the memory of a buffer, in the lowered program and in the search's count."""
    peaks, counts = [], []
    for is_buffer in (True, False):
        planning = problem_of(trace(Offset(is_buffer=is_buffer), (torch.zeros(8, 16),)), LINE)
        whole = [0] * len(planning.members)
        peaks.append(peak_of(planning, whole))
        counts.append(planning.usage(whole).max())
    assert peaks[0] == peaks[1]
    assert counts[0] == counts[1]
