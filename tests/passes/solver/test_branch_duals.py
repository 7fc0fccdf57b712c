"""Branching on drawn problems: bounds hold and rise, and knapsacks, which a Lagrangian cannot close, are closed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.solver.assignment import Assignment
from passes.solver.dual_search import DualSearch
from passes.solver.solve_exhaustive import solve_exhaustive
from tests.passes.solver.closing import check_closer, knapsacks
from tests.passes.solver.test_dual_search import usage_of
from tests.passes.solver.test_solve_milp import assignments


@given(assignments(), st.integers(1, 5))
def test_parts_raise_the_bound_and_never_above_the_optimum(problem: Assignment, parts: int) -> None:
    """And the cost found never rises with them."""
    searches = (DualSearch(tolerance=0.0, max_rounds=4, most_parts=most) for most in (0, parts))
    check_closer(problem, *searches)


@given(knapsacks(most=4))
def test_knapsacks_are_closed(problem: Assignment) -> None:
    """To the optimum."""
    best = solve_exhaustive(problem)
    found = DualSearch(most_parts=200)(problem, usage_of(problem), problem.rows.__getitem__)
    assert found is not None
    assert best is not None
    assert found.cost == pytest.approx(best.cost)
    assert found.lower_bound == pytest.approx(best.cost, rel=2e-3)
