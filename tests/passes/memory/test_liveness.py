"""Bytes in memory at each point of a step, as the search counts them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.tracing import trace
from passes.lowering.lower_program import prepare
from passes.memory.liveness import find_lifetimes
from passes.planning.build_assignment import PlanningProblem, build_problem
from passes.strategies.enumerate_strategies import EnumerateStrategies
from passes.strategies.price import Prices
from tests.passes.blocks import blocks_program, h100s, problem_of
from tests.passes.drawn_choices import drawn_choice

MESH = Mesh({"x": 2})


class WithHidden(nn.Module):
    """A model that returns a value which its loss and backward also use, plain or through a view."""

    def __init__(self, *, viewed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.viewed = viewed

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = (x @ self.weight).exp()
        returned = hidden.view(4, 2, 16) if self.viewed else hidden
        return hidden.square().sum(), returned


def _problem(*, viewed: bool) -> PlanningProblem:
    space = EnumerateStrategies(MESH)(prepare(trace(WithHidden(viewed=viewed), (torch.randn(8, 16),))))
    alone = {name: name for name in space.sites}
    liveness = find_lifetimes(space, 0.0)
    return build_problem(space, Prices(h100s(MESH), MESH), liveness, alone)


def test_a_result_that_is_used_later_is_counted_once() -> None:
    """A returned value that the backward also reads is counted once, also if it is returned through a view.

    At the end, parameter, input, tangent, loss, hidden value and gradient are in memory.
    """
    for viewed in (False, True):
        planning = _problem(viewed=viewed)
        used = planning.usage([0] * len(planning.members))
        parameter, hidden, scalar = 16 * 16 * 4, 8 * 16 * 4, 4
        assert used[-1] == parameter + hidden + scalar + scalar + hidden + parameter
        assert used.max() < parameter + hidden + 2 * scalar + 4 * hidden + parameter


def test_a_split_result_is_handed_out_as_it_lies() -> None:
    """If a result is split over two ranks, half of its bytes are in memory at the end of the step."""
    planning = _problem(viewed=False)
    choice = [0] * len(planning.members)
    output = planning.classes["output:1"]
    split = next(i for i, s in enumerate(planning.space.sites["output:1"].strategies) if s.inputs[0].dims)
    whole = planning.usage(choice)
    choice[output] = split
    moved = planning.usage(choice)
    assert moved[-1] == whole[-1] - 8 * 16 * 4 // 2
    assert np.any(moved > whole)


def test_a_row_is_the_usage_at_its_point() -> None:
    """The bytes of a memory row equal the usage at the row's point, for a drawn choice on a real program."""
    planning = problem_of(blocks_program(count=2), Mesh({"x": 2}))
    choice = drawn_choice(planning, 1)
    used = planning.usage(choice)
    for point in range(0, planning.liveness.points, 7):
        assert planning.memory_row(point).bytes_of(choice, planning.assignment.edges) == pytest.approx(used[point])
