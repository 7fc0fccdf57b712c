"""Repeated blocks share their choices, so depth does not make the problem larger."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.tracing import trace
from passes.planning.build_assignment import build_problem
from tests.passes.blocks import blocks_program, problem_of


def test_depth_adds_no_variables() -> None:
    """Problems of 4, 8 and 12 layers have equally many variables, and each four layers add the same cost."""
    mesh = Mesh({"x": 2})
    four, eight, twelve = (problem_of(blocks_program(count=count), mesh) for count in (4, 8, 12))
    assert len(four.assignment.costs) == len(eight.assignment.costs) == len(twelve.assignment.costs)
    whole = [0] * len(four.assignment.costs)
    costs = [planning.assignment.cost_of(whole) for planning in (four, eight, twelve)]
    assert abs((costs[2] - costs[1]) - (costs[1] - costs[0])) < 1e-12


def test_folding_does_not_change_what_a_plan_costs() -> None:
    """A choice has equal costs with one variable per class and with one variable per call."""
    folded = problem_of(blocks_program(count=3), Mesh({"x": 2}))
    sites = folded.space.sites
    first = [min(1, len(sites[group[0]].strategies) - 1) for group in folded.members]
    assert max(map(len, folded.members)) == 3
    alone = build_problem(folded.space, folded.prices, folded.liveness, {name: name for name in sites})
    choice = [first[folded.classes[name]] for (name,) in alone.members]
    assert folded.assignment.cost_of(first) == pytest.approx(alone.assignment.cost_of(choice), rel=1e-9)


def test_layers_of_a_single_product_are_not_folded() -> None:
    """Four bare linear layers are not folded, so that a plan may alternate between columns and rows."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    planning = problem_of(trace(model, (torch.randn(4, 8),), {}, grad=False), Mesh({"x": 2}))
    parameters = [group for group in planning.members if group[0].startswith("p_")]
    assert [len(group) for group in parameters] == [1, 1, 1, 1]
