"""The solver against the exhaustive oracle, on drawn problems."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.solver import reduce_assignment as reduce_assignment_module
from passes.solver.assignment import Assignment, Edge, MemoryRow
from passes.solver.reduce_assignment import reduce_assignment
from passes.solver.search_control import SearchControl, SearchProgress
from passes.solver.solve_milp import solve_milp
from tests.passes.solver.exhaustive import solve_exhaustive


@st.composite
def assignments(draw: st.DrawFn, *, with_memory: bool = True) -> Assignment:
    """Draw up to six variables of up to four options, some options and pairs forbidden, up to three memory rows."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density = draw(st.sampled_from([0.3, 0.6, 1.0]))
    costs = tuple(numbers.integers(0, 20, size).astype(float) * 1e-6 for size in sizes)
    costs = tuple(np.where(numbers.random(len(cost)) < 0.1, np.inf, cost) for cost in costs)
    edges = []
    for tail in range(len(sizes)):
        for head in range(tail):
            if numbers.random() < density:
                table = numbers.integers(0, 9, (sizes[tail], sizes[head])) * 1e-6
                table = np.where(numbers.random(table.shape) < 0.15, np.inf, table)
                edges.append(Edge(tail, head, table))
    rows = [_row(numbers, sizes, edges) for _ in range(draw(st.integers(0, 3)) if with_memory else 0)]
    limit = draw(st.sampled_from([40.0, 80.0, 120.0])) * 2**20
    return Assignment(costs, tuple(edges), tuple(rows), limit)


def _row(numbers: np.random.Generator, sizes: list[int], edges: list[Edge]) -> MemoryRow:
    variables = {v: numbers.integers(0, 30, n) * 2.0**20 for v, n in enumerate(sizes) if numbers.random() < 0.7}
    tables = {
        e: numbers.integers(0, 9, edge.cost.shape) * 2.0**20 for e, edge in enumerate(edges) if numbers.random() < 0.3
    }
    return MemoryRow(float(numbers.integers(0, 10) * 2**20), variables, tables)


@given(assignments())
def test_the_solver_finds_what_exhaustive_search_finds(problem: Assignment) -> None:
    """Same optimum, or both find that nothing fits; the bound is proven and never above the cost."""
    found, best = solve_milp(problem), solve_exhaustive(problem)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.cost == pytest.approx(best.cost, rel=1e-9, abs=1e-15)
        assert problem.fits(found.choice)
        assert found.lower_bound <= found.cost


def _hard() -> Assignment:
    """A problem that the solver looks up from."""
    numbers = np.random.default_rng(0)
    pairs = [(tail, head) for tail in range(12) for head in range(tail)]
    costs = tuple(numbers.random(4) for _ in range(12))
    return Assignment(costs, tuple(Edge(tail, head, numbers.random((4, 4))) for tail, head in pairs))


def test_a_solver_that_is_stopped_keeps_its_bound() -> None:
    """A solver stopped at its first look has a bound below the optimum, with or without a choice."""
    problem = _hard()
    shown: list[SearchProgress] = []
    best = solve_milp(problem, control=SearchControl(shown.append))
    assert best is not None
    assert shown
    assert all(item.lower_bound <= best.cost * (1 + 1e-9) for item in shown)
    try:
        found = solve_milp(problem, control=SearchControl(is_stopped=True))
    except TimeoutError:
        return
    assert found is not None
    assert found.lower_bound <= best.cost * (1 + 1e-9) <= found.cost * (1 + 2e-9)


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_what_the_watcher_raises_comes_out_of_the_solver(error: type[BaseException]) -> None:
    """An exception of the watcher, such as a second Ctrl-C, leaves the solver as an exception."""

    def show(progress: SearchProgress) -> None:
        raise error

    with pytest.raises(error):
        solve_milp(_hard(), control=SearchControl(show))


@given(assignments())
def test_reductions_keep_the_optimum(problem: Assignment) -> None:
    """The reduced problem has the same optimum, and its expanded solution attains the optimum."""
    reduced = reduce_assignment(problem)
    best, small = solve_exhaustive(problem), solve_exhaustive(reduced.problem)
    if best is None:
        assert small is None or not np.isfinite(small.cost + reduced.constant)
        return
    assert small is not None
    assert small.cost + reduced.constant == pytest.approx(best.cost, rel=1e-9, abs=1e-15)
    assert problem.cost_of(reduced.expand(small.choice)) == pytest.approx(best.cost, rel=1e-9, abs=1e-15)


@given(assignments(with_memory=False))
def test_what_no_table_has_room_for_stays(problem: Assignment) -> None:
    """Variables whose elimination needs a large table stay, and the reduced problem has the same optimum."""
    with mock.patch.object(reduce_assignment_module, "_MAX_TABLE", 1):
        reduced = reduce_assignment(problem)
    best, small = solve_exhaustive(problem), solve_exhaustive(reduced.problem)
    found = np.inf if small is None else small.cost + reduced.constant
    assert found == pytest.approx(np.inf if best is None else best.cost, rel=1e-9, abs=1e-15)


@given(assignments(), st.sampled_from([0.5, 0.9, 0.999, 1.001, 1.1, 3.0]))
def test_what_costs_as_much_as_is_known_is_not_looked_for(problem: Assignment, share: float) -> None:
    """The solver finds the optimum below a known cost, and nothing at the known cost."""
    best = solve_exhaustive(problem)
    below = share * (1e-5 if best is None else best.cost)
    found = solve_milp(problem, below=below)
    assert (found is None) == (best is None or best.cost >= below)
    if found is not None and best is not None:
        assert found.cost == pytest.approx(best.cost, rel=1e-9, abs=1e-15)
