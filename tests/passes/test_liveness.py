"""What is in memory when."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.tracing import trace
from passes.build_assignment import PlanningProblem, build_problem
from passes.enumerate_strategies import EnumerateStrategies
from passes.liveness import find_lifetimes
from passes.pipeline import prepare
from passes.price import Prices
from tests.passes.blocks import h100s

MESH = Mesh({"x": 2})


class WithHidden(nn.Module):
    """Returns a value that the loss, and the backward, use as well; as it is or through a view."""

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
    return build_problem(space, Prices(h100s(MESH), MESH), find_lifetimes(space, 0.0), alone)


def test_a_result_that_is_used_later_is_counted_once() -> None:
    """At the end there are the parameter, the input, the tangent, the loss, the hidden value and the gradient."""
    for viewed in (False, True):
        planning = _problem(viewed=viewed)
        used = planning.usage([0] * len(planning.members))
        parameter, hidden, scalar = 16 * 16 * 4, 8 * 16 * 4, 4
        assert used[-1] == parameter + hidden + scalar + scalar + hidden + parameter
        assert used.max() < parameter + hidden + 2 * scalar + 4 * hidden + parameter


def test_a_result_that_is_resharded_is_a_copy() -> None:
    """The copy is there from the time when the value is, and to the end."""
    planning = _problem(viewed=False)
    choice = [0] * len(planning.members)
    output = planning.classes["output:1"]
    split = next(i for i, s in enumerate(planning.space.sites["output:1"].strategies) if s.inputs[0].dims)
    whole = planning.usage(choice)
    choice[output] = split
    moved = planning.usage(choice)
    assert moved[-1] == whole[-1] - 8 * 16 * 4 // 2
    assert np.any(moved > whole)
