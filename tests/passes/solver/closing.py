"""Rules for every way of closing a gap by duality, and knapsacks, whose gap a Lagrangian leaves."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from passes.solver.assignment import Assignment, Edge, MemoryRow
from passes.solver.dual_search import DualSearch
from tests.passes.solver.exhaustive import solve_exhaustive
from tests.passes.solver.test_dual_search import usage_of


def check_closer(problem: Assignment, without: DualSearch, closing: DualSearch) -> None:
    """Check that bounds rise, found costs fall and the optimum stays in between, with a fitting result."""
    best = solve_exhaustive(problem)
    plain, closer = (search(problem, usage_of(problem), problem.rows.__getitem__) for search in (without, closing))
    assert (plain is None) == (closer is None)
    if plain is not None and closer is not None and best is not None:
        assert plain.lower_bound <= closer.lower_bound * (1 + 1e-9) + 1e-15
        assert closer.lower_bound <= best.cost * (1 + 1e-9) + 1e-15
        assert best.cost * (1 - 1e-9) - 1e-15 <= closer.cost <= plain.cost * (1 + 1e-9) + 1e-15
        assert problem.fits(closer.choice)


@st.composite
def knapsacks(draw: st.DrawFn, most: int) -> Assignment:
    """Two variables to `most`: each pays its price to save its bytes; the limit leaves a share of all bytes."""
    prices = draw(st.lists(st.integers(1, 50), min_size=2, max_size=most))
    sizes = draw(st.lists(st.integers(1, 50), min_size=len(prices), max_size=len(prices)))
    costs = tuple(np.array([0.0, float(price)]) for price in prices)
    row = MemoryRow(0.0, {variable: np.array([float(size), 0.0]) for variable, size in enumerate(sizes)}, {})
    edges = tuple(Edge(first, first + 1, np.zeros((2, 2))) for first in range(len(prices) - 1))
    return Assignment(costs, edges, (row,), limit=draw(st.floats(0.2, 0.8)) * sum(sizes))
