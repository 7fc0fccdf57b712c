"""Asking below targets, on drawn problems: bounds hold and rise, what is found fits, and knapsacks are closed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from passes.solver.assignment import Assignment, MemoryRow
from passes.solver.dual_search import DualSearch
from passes.solver.dual_state import DualState
from passes.solver.narrow_assignment import narrow_by
from passes.solver.search_control import SearchControl
from passes.solver.solve_exhaustive import solve_exhaustive
from passes.solver.solve_milp import Effort, solve_milp
from tests.passes.solver.closing import check_closer, knapsacks
from tests.passes.solver.test_dual_search import usage_of
from tests.passes.solver.test_solve_milp import assignments


@given(assignments(), st.integers(1, 5))
def test_targets_raise_the_bound_and_never_above_the_optimum(problem: Assignment, targets: int) -> None:
    """And the cost found never rises with them."""
    searches = (DualSearch(tolerance=0.0, max_rounds=2, most_targets=most) for most in (0, targets))
    check_closer(problem, *searches)


@given(knapsacks(most=5))
def test_knapsacks_are_closed(problem: Assignment) -> None:
    """Within the tolerance."""
    best = solve_exhaustive(problem)
    found = DualSearch(most_targets=100)(problem, usage_of(problem), problem.rows.__getitem__)
    assert found is not None
    assert best is not None
    assert found.cost == pytest.approx(best.cost, rel=1e-3)
    assert found.lower_bound == pytest.approx(found.cost, rel=2e-3)


@given(assignments(), st.floats(0.5, 2.0), st.integers(1, 3))
def test_what_messages_leave_has_all_that_is_cheaper(problem: Assignment, share: float, rounds: int) -> None:
    """Of a problem narrowed to below a target, the cheapest choice is that of the whole, if it costs less."""
    best = solve_exhaustive(problem)
    state = DualState(problem, usage_of(problem), problem.rows.__getitem__, SearchControl())
    for _ in range(rounds):
        state.round()
    target = share * best.cost if best is not None else share
    known = dataclasses.replace(problem, rows=tuple(state.rows.values()))
    left = narrow_by(known, state.found_multipliers(), target)
    if best is not None and best.cost < target:
        assert left is not None
        assert left.cost_of(best.choice) == pytest.approx(best.cost)


@given(assignments(), st.integers(0, 2))
def test_a_search_of_few_nodes_is_bounded(problem: Assignment, nodes: int) -> None:
    """Whatever effort is made: bound <= optimum <= cost found, and nothing is found only where nothing is."""
    best = solve_exhaustive(problem)
    try:
        found = solve_milp(problem, effort=Effort(0.1, nodes))
    except TimeoutError:
        reject()
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.lower_bound <= best.cost * (1 + 1e-9) + 1e-15
        assert best.cost <= found.cost * (1 + 1e-9) + 1e-15


def test_a_stopped_search_asks_nothing() -> None:
    """The bound stays that of the rounds."""
    costs = tuple(np.array([0.0, float(price)]) for price in (7, 11, 13))
    row = MemoryRow(0.0, {v: np.array([size, 0.0]) for v, size in enumerate((3.0, 4.0, 5.0))}, {})
    problem = Assignment(costs, (), (row,), limit=6.5)
    bounds = []
    for most, stopped in ((0, False), (50, True), (50, False)):
        control = SearchControl(is_stopped=stopped)
        search = DualSearch(max_rounds=1, most_targets=most, control=control)
        start = (1, 1, 1)
        found = search(problem, usage_of(problem), lambda _: row, [start])
        assert found is not None
        bounds.append(found.lower_bound)
    assert bounds[0] == bounds[1] < bounds[2]
