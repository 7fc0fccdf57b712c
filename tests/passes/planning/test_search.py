"""On real programs the search equals trying every plan, and keeps to its memory limit."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autoshard.errors import DoesNotFitError
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.tracing import trace
from passes.planning.build_assignment import PlanningProblem
from passes.planning.search import Search
from passes.solver.search_control import SearchControl
from tests.passes.blocks import perceptron_program, problem_of

SIZES = st.sampled_from([4, 8, 64, 512, 4096])


class Chain(nn.Module):
    """A product, a pointwise operator and a reduction, in one of several orders."""

    def __init__(self, rows: int, columns: int, form: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        if self.form == 0:
            return torch.relu(y).sum(0)
        if self.form == 1:
            return (y.t() + 1.0).amax(1)
        return y.reshape(-1).exp()


@st.composite
def chains(draw: st.DrawFn) -> Program:
    """Draw forward programs of up to seven sites, few enough to try all their plans."""
    batch, rows, columns = draw(SIZES), draw(SIZES), draw(SIZES)
    with torch.device("meta"):
        model = Chain(rows, columns, draw(st.integers(0, 2)))
        return trace(model, (torch.zeros(batch, rows),), {}, grad=False)


def cheapest(planning: PlanningProblem, limit: float) -> float | None:
    """Return the least cost of all fitting choices by trying every choice."""
    options = [range(len(cost)) for cost in planning.assignment.costs]
    costs = (
        planning.assignment.cost_of(choice) for choice in product(*options) if planning.usage(choice).max() <= limit
    )
    return min((cost for cost in costs if np.isfinite(cost)), default=None)


@settings(max_examples=10)
@given(chains(), st.sampled_from([0.3, 0.6, 0.9, 2.0]))
def test_the_search_equals_trying_every_plan(program: Program, share: float) -> None:
    """Under drawn memory limits, the search finds the cost of trying every plan, or both find that no plan fits."""
    planning = problem_of(program, Mesh({"x": 2}))
    whole = float(planning.usage([0] * len(planning.assignment.costs)).max())
    best = cheapest(planning, share * whole)
    search = Search(share * whole)
    if best is None:
        with pytest.raises(DoesNotFitError):
            search(planning)
        return
    solution = search(planning)
    assert solution.cost == pytest.approx(best, rel=1e-9)
    assert planning.usage(solution.choice).max() <= share * whole


@settings(max_examples=5)
@given(chains(), st.sampled_from([0.6, 0.9, 2.0]))
def test_a_search_that_is_stopped_at_once_gives_what_fits(program: Program, share: float) -> None:
    """A search that stops at once returns a fitting plan with a valid lower bound, unless memory is scarce."""
    planning = problem_of(program, Mesh({"x": 2}))
    limit = share * float(planning.usage([0] * len(planning.assignment.costs)).max())
    best = cheapest(planning, limit)
    try:
        solution = Search(limit, control=SearchControl(is_stopped=True))(planning)
    except DoesNotFitError:
        assert share < 1.0
        return
    assert best is not None
    assert solution.lower_bound <= best * (1 + 1e-9)
    assert best <= solution.cost * (1 + 1e-9)
    assert planning.usage(solution.choice).max() <= limit


@settings(max_examples=8)
@given(chains(), st.sampled_from([0.6, 0.9, 2.0]))
def test_the_search_is_exact_where_memory_does_not_bind(program: Program, share: float) -> None:
    """A plan fits in the limit and has a valid lower bound. If the best plan without a limit fits, it is found."""
    planning = problem_of(program, Mesh({"x": 2}))
    limit = share * float(planning.usage([0] * len(planning.assignment.costs)).max())
    best = cheapest(planning, limit)
    try:
        solution = Search(limit)(planning)
    except DoesNotFitError:
        assert share < 1.0
        return
    assert best is not None
    assert planning.usage(solution.choice).max() <= limit
    assert solution.lower_bound <= best * (1 + 1e-9)
    assert best <= solution.cost * (1 + 1e-9)
    free = Search()(planning)
    if planning.usage(free.choice).max() <= limit:
        assert solution.cost == free.cost


def test_more_memory_is_never_slower() -> None:
    """With a larger memory limit the cost falls or stays, up to 0.1 %."""
    planning = problem_of(perceptron_program(batch=4096), Mesh({"x": 2}))
    largest = float(planning.usage(Search()(planning).choice).max())
    costs = []
    for share in (0.55, 0.6, 0.7, 0.8, 0.9, 1.0):
        try:
            costs.append(Search(share * largest)(planning).cost)
        except DoesNotFitError:
            assert not costs, "what fits in little memory fits in more"
    assert len(costs) >= 2
    assert all(more <= less * 1.001 for less, more in pairwise(costs))
    assert costs[-1] < costs[0]


def test_a_problem_that_does_not_fit_says_what_would() -> None:
    """If no plan fits, the error states a memory limit within which the search finds a plan."""
    planning = problem_of(perceptron_program(batch=4096), Mesh({"x": 2}))
    with pytest.raises(DoesNotFitError) as caught:
        Search(1e4)(planning)
    assert Search(caught.value.smallest_bytes)(planning).cost > 0


def test_a_limit_that_no_user_gave_is_the_memory_of_a_device() -> None:
    """If no plan fits, the error names `memory_budget` if the user gave it, and otherwise the memory of a device."""
    planning = problem_of(perceptron_program(batch=4096), Mesh({"x": 2}))
    with pytest.raises(DoesNotFitError, match=r"in memory_budget=2048 bytes \(2\.00 KiB\) per device\. "):
        Search(2048)(planning)
    with pytest.raises(DoesNotFitError, match=r"in a device's memory \(2\.00 KiB\)\. "):
        Search(2048, is_given=False)(planning)
