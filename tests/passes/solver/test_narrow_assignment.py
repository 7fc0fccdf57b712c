"""Narrowing loses nothing that is cheaper than what is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from passes.solver.assignment import Assignment, Edge
from passes.solver.narrow_assignment import narrow
from passes.solver.solve_exhaustive import solve_exhaustive
from tests.passes.solver.test_solve_milp import assignments


@given(assignments(), st.sampled_from([0.5, 0.99, 1.01, 1.1, 1.5, 3.0]))
def test_the_optimum_stays_where_it_is_cheaper_than_what_is_known(problem: Assignment, share: float) -> None:
    """And where nothing is, that may be found out."""
    best = solve_exhaustive(problem)
    below = share * (1e-5 if best is None else best.cost)
    narrowed = narrow(problem, below, math.inf)
    if best is None or best.cost >= below:
        event("nothing is cheaper" + (", which is found out" if narrowed is None else ""))
        return
    assert narrowed is not None
    assert solve_exhaustive(narrowed) == best
    forbidden = [np.isinf(after).sum() - np.isinf(before).sum() for before, after in _tables(problem, narrowed)]
    assert min(forbidden) >= 0
    event(f"something is forbidden: {any(forbidden)}")


def _tables(problem: Assignment, other: Assignment) -> list[tuple[np.ndarray, np.ndarray]]:
    edges = zip(problem.edges, other.edges, strict=True)
    return [*zip(problem.costs, other.costs, strict=True), *((one.cost, two.cost) for one, two in edges)]


def test_without_time_there_is_nothing_to_say() -> None:
    """Rather than a problem that looks narrowed."""
    one = Assignment((np.array([1.0, 2.0]), np.array([1.0, 2.0])), (), (), math.inf)
    assert narrow(one, 10.0, 0.0) is not None  # nothing is left to solve once it is reduced
    with pytest.raises(TimeoutError):
        narrow(_bound_together(), 100.0, 0.0)


def _bound_together() -> Assignment:
    """Five variables, each of which is joined to the others: nothing is reduced."""
    numbers = np.random.default_rng(0)
    pairs = [(tail, head) for tail in range(5) for head in range(tail)]
    costs = tuple(numbers.random(4) for _ in range(5))
    return Assignment(costs, tuple(Edge(tail, head, numbers.random((4, 4))) for tail, head in pairs))
