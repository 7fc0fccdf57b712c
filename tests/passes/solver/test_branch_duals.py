"""Branching on drawn problems: bounds hold and rise, and knapsacks, which a Lagrangian cannot close, are closed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.solver.assignment import Assignment, Edge, MemoryRow
from passes.solver.dual_search import DualSearch
from passes.solver.solve_exhaustive import solve_exhaustive
from tests.passes.solver.test_dual_search import usage_of
from tests.passes.solver.test_solve_milp import assignments


@given(assignments(), st.integers(1, 5))
def test_parts_raise_the_bound_and_never_above_the_optimum(problem: Assignment, parts: int) -> None:
    """bound without parts <= bound with parts <= optimum <= cost found <= cost found without; what is found fits."""
    best = solve_exhaustive(problem)
    plain, parted = (
        DualSearch(tolerance=0.0, max_rounds=4, most_parts=most)(problem, usage_of(problem), problem.rows.__getitem__)
        for most in (0, parts)
    )
    assert (plain is None) == (parted is None)
    if plain is not None and parted is not None and best is not None:
        assert plain.lower_bound <= parted.lower_bound * (1 + 1e-9) + 1e-15
        assert parted.lower_bound <= best.cost * (1 + 1e-9) + 1e-15
        assert best.cost * (1 - 1e-9) - 1e-15 <= parted.cost <= plain.cost * (1 + 1e-9) + 1e-15
        assert problem.fits(parted.choice)


@given(
    prices=st.lists(st.integers(1, 50), min_size=2, max_size=4),
    sizes=st.lists(st.integers(1, 50), min_size=4, max_size=4),
    share=st.floats(0.2, 0.8),
)
def test_knapsacks_are_closed(prices: list[int], sizes: list[int], share: float) -> None:
    """Each variable pays its price to save its bytes; the limit leaves a share of all bytes. Within the tolerance."""
    costs = tuple(np.array([0.0, float(price)]) for price in prices)
    row = MemoryRow(0.0, {v: np.array([float(size), 0.0]) for v, size in enumerate(sizes[: len(prices)])}, {})
    limit = share * sum(sizes[: len(prices)])
    edges = tuple(Edge(v, v + 1, np.zeros((2, 2))) for v in range(len(prices) - 1))
    problem = Assignment(costs, edges, (row,), limit=limit)
    best = solve_exhaustive(problem)
    found = DualSearch(most_parts=200)(problem, usage_of(problem), lambda _: row)
    assert found is not None
    assert best is not None
    assert found.cost == pytest.approx(best.cost)
    assert found.lower_bound == pytest.approx(best.cost, rel=2e-3)
