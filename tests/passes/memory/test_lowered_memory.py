"""The memory of lowered programs, and the bound that a search has of it."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autoshard import Mesh, tracing
from autoshard.testing.programs import programs
from passes.driver.plan_of_choice import memory_of_choice
from passes.driver.plan_options import PlanOptions
from passes.memory.storages import ACTIVATIONS, GRADIENTS, PARAMETERS, PARTS, STATE
from tests.passes.blocks import blocks_program, peak_of, perceptron_program, problem_of
from tests.passes.prediction.test_segment_step import drawn_choice

LINE, SQUARE, THREE = Mesh({"x": 2}), Mesh({"x": 2, "y": 2}), Mesh({"x": 3})


@pytest.mark.parametrize("seed", range(3))
def test_a_search_counts_no_less(seed: int) -> None:
    """With optimizer state beside the parameters, too."""
    for program, ratio in ((blocks_program(count=2), 2.0), (perceptron_program(9), 0.0)):
        planning = problem_of(program, SQUARE, state_bytes_per_parameter_byte=ratio)
        choice = drawn_choice(planning, seed)
        assert peak_of(planning, choice) <= planning.usage(choice).max()


class Centred(nn.Module):
    """Subtracts a mean, and returns the rest, which is handed out whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("seed", range(3))
def test_a_search_counts_the_padding_of_gathered_values(seed: int) -> None:
    """Outputs that are handed out too."""
    planning = problem_of(tracing.trace(Centred(), (torch.zeros(3, 6, 12),)), SQUARE)
    choice = drawn_choice(planning, seed)
    assert peak_of(planning, choice) <= planning.usage(choice).max()


@settings(max_examples=6)
@given(st.data())
def test_a_search_counts_no_less_of_uneven_dims(data: st.DataObject) -> None:
    """Whatever the plan."""
    drawn = data.draw(programs(max_blocks=1, uneven=True))
    planning = problem_of(tracing.trace(drawn.model, drawn.inputs), data.draw(st.sampled_from([THREE, SQUARE])))
    for seed in range(3):
        choice = drawn_choice(planning, seed)
        assert peak_of(planning, choice) <= planning.usage(choice).max()


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_add_up_to_the_peak(seed: int) -> None:
    """Whatever the plan."""
    planning = problem_of(blocks_program(count=3), Mesh({"data": 2, "model": 2}), state_bytes_per_parameter_byte=2.0)
    memory = memory_of_choice(planning, drawn_choice(planning, seed), PlanOptions())
    assert tuple(memory.parts) == PARTS
    assert sum(memory.parts.values()) == memory.peak_bytes
    assert memory.parts[STATE] == 2 * memory.parts[PARAMETERS]


def test_gradients_are_all_of_the_peak_that_grows_with_parameters_alone() -> None:
    """Of small batches the peak is at the end of the backward, where all gradients are; of large ones, before."""
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
    """Parameters and their state are stored less."""
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
