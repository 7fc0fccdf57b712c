"""A plan's memory is the memory of its lowered program."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autoshard import Mesh, tracing
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.spec import PartitionSpec as P
from autoshard.testing.plans import plans
from autoshard.testing.programs import programs
from cost_models.hardware import Cluster
from passes.driver.plan_of_choice import lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program
from passes.memory.lowered_memory import peak_bytes
from passes.planning.exact_memory import PARTS, exact_memory, exact_peak
from tests.passes.blocks import blocks_program, h100s, perceptron_program, problem_of
from tests.passes.drawn_choices import drawn_choice
from tests.passes.greedy_plans import most_uneven_plan

LINE, SQUARE, THREE = Mesh({"x": 2}), Mesh({"x": 2, "y": 2}), Mesh({"x": 3})


def lowered_bytes(program: Program, plan: Plan) -> int:
    """The peak of the program that a plan is lowered to."""
    cluster = Cluster("cpu_laptop", nodes=1, devices_per_node=plan.mesh.size)
    return peak_bytes(lower_program(program, plan, cluster))


@settings(max_examples=6)
@given(st.data())
def test_drawn_plans_are_counted_to_the_byte(data: st.DataObject) -> None:
    """Whatever is resharded where, and recomputed or not."""
    drawn = data.draw(programs(max_blocks=2, uneven=False))
    mesh = data.draw(st.sampled_from([LINE, SQUARE]))
    program = tracing.trace(drawn.model, drawn.inputs)
    plan = data.draw(plans(program, mesh))
    assert plan.predicted.peak_memory_bytes == lowered_bytes(program, plan)


@settings(max_examples=6)
@given(st.data())
def test_padding_is_counted_where_it_is_held(data: st.DataObject) -> None:
    """The count of uneven dims is never less than their bytes, and hardly more."""
    drawn = data.draw(programs(max_blocks=2, uneven=True))
    mesh = data.draw(st.sampled_from([THREE, SQUARE]))
    program = tracing.trace(drawn.model, drawn.inputs)
    plan = most_uneven_plan(program, mesh) if data.draw(st.booleans()) else data.draw(plans(program, mesh))
    lowered = lowered_bytes(program, plan)
    assert lowered <= plan.predicted.peak_memory_bytes <= 1.05 * lowered


@pytest.mark.parametrize("seed", range(3))
def test_a_search_counts_no_less(seed: int) -> None:
    """At no point; with optimizer state beside the parameters, too."""
    for program, ratio in ((blocks_program(count=2), 2.0), (perceptron_program(9), 0.0)):
        planning = problem_of(program, SQUARE, state_bytes_per_parameter_byte=ratio)
        choice = drawn_choice(planning, seed)
        assert np.all(exact_memory(planning, choice).used() <= planning.usage(choice))


def test_a_repeated_value_is_copied_before_it_is_reduced() -> None:
    """An expanded gradient is in memory once; a collective sends all of it."""
    program = tracing.trace(Summed(), (torch.arange(64).reshape(8, 8) % 16,))
    planning = problem_of(program, LINE)
    partial = (P(partial={"x": "sum"}),)
    choice = []
    for name, *_ in planning.members:
        pairs = [(found.inputs, found.outputs) for found in planning.space.sites[name].strategies]
        wanted = [(partial, partial)] if name == "expand" else [pair for pair in pairs if {*pair[0], *pair[1]} <= {P()}]
        choice.append(pairs.index(wanted[0]))
    plan = lowered_plan(planning, choice, 0.0, None, h100s(LINE), PlanOptions()).plan
    assert plan.predicted.peak_memory_bytes == lowered_bytes(program, plan)


def test_what_a_split_call_does_not_read_is_not_held_for_it() -> None:
    """The backward of batch norm on a split batch finds mean and variance over all ranks itself, so none is held."""
    program = tracing.trace(Normed(), (torch.arange(16).reshape(4, 4),))
    planning = problem_of(program, LINE)
    split = ((P("x"), P("x"), P(), P(), P(), P()), (P("x"),))
    choice = []
    for name, *_ in planning.members:
        pairs = [(found.inputs, found.outputs) for found in planning.space.sites[name].strategies]
        whole = next(place for place, pair in enumerate(pairs) if {*pair[0], *pair[1]} <= {P()})
        choice.append(pairs.index(split) if name == "native_batch_norm_backward" else whole)
    plan = lowered_plan(planning, choice, 0.0, None, h100s(LINE), PlanOptions()).plan
    assert plan.predicted.peak_memory_bytes == lowered_bytes(program, plan)


class Normed(nn.Module):
    """The mean of a normalised embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.position = nn.Embedding(4, 8)
        self.norm = nn.BatchNorm1d(8, affine=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens) + self.position(torch.arange(4))
        return self.norm(h.flatten(0, 1)).unflatten(0, (4, 4)).mean()


class Summed(nn.Module):
    """The sum of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x).sum()


class Centred(nn.Module):
    """Subtracts a mean, and returns what is left, which is handed out whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("seed", range(3))
def test_a_search_counts_the_padding_of_what_is_gathered(seed: int) -> None:
    """Outputs that are handed out too: never less than there is, at no point."""
    planning = problem_of(tracing.trace(Centred(), (torch.zeros(3, 6, 12),)), SQUARE)
    choice = drawn_choice(planning, seed)
    assert np.all(exact_memory(planning, choice).used() <= planning.usage(choice))


@settings(max_examples=6)
@given(st.data())
def test_a_search_counts_no_less_of_uneven_dims(data: st.DataObject) -> None:
    """At the peak, whatever the plan."""
    drawn = data.draw(programs(max_blocks=1, uneven=True))
    planning = problem_of(tracing.trace(drawn.model, drawn.inputs), data.draw(st.sampled_from([THREE, SQUARE])))
    for seed in range(3):
        choice = drawn_choice(planning, seed)
        assert exact_peak(planning, choice) <= planning.usage(choice).max()


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_add_up_to_what_is_in_use(seed: int) -> None:
    """At every point of the program, whatever the plan."""
    planning = problem_of(blocks_program(count=3), Mesh({"data": 2, "model": 2}), state_bytes_per_parameter_byte=2.0)
    memory = exact_memory(planning, drawn_choice(planning, seed))
    for point, used in enumerate(memory.used()):
        parts = memory.at(point)
        assert tuple(parts) == PARTS
        assert sum(parts.values()) == used
        assert parts["optimizer state"] == 2 * parts["parameters"]


def test_gradients_grow_and_activations_shrink_in_the_backward() -> None:
    """At the end all gradients are there, and nothing that the forward saved."""
    planning = problem_of(blocks_program(count=3), LINE)
    memory = exact_memory(planning, [0] * len(planning.members))
    last = memory.points - 1
    start, middle, end = (memory.at(point) for point in (0, last // 2, last))
    assert start["gradients"] == 0
    assert end["gradients"] == end["parameters"]
    assert end["activations"] < middle["activations"]


def test_another_axis_on_a_spec_takes_nothing_more() -> None:
    """Another axis on a parameter's spec stores less before and behind the step, if nothing is on its way."""
    planning = problem_of(blocks_program(count=1), SQUARE, state_bytes_per_parameter_byte=2.0)
    choice = drawn_choice(planning, 0)
    for name in planning.liveness.parameters:
        variable = planning.classes[name]
        specs = [strategy.outputs[0] for strategy in planning.space.sites[name].strategies]
        used = [
            exact_memory(planning, [*choice[:variable], n, *choice[variable + 1 :]]).used() for n in range(len(specs))
        ]
        for one, two in permutations(range(len(specs)), 2):
            if set(specs[one].axes) < set(specs[two].axes):
                assert used[two][0] < used[one][0]
                assert used[two][-1] < used[one][-1]
