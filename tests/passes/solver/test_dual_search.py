"""The lower bound of a dual search is at most the optimum, and its result fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autoshard.tracing.replaced import replaced
from passes.solver import merge_choices
from passes.solver.assignment import Assignment, Edge, MemoryRow
from passes.solver.dual_search import DualSearch
from passes.solver.dual_state import Usage
from passes.solver.messages import Messages
from passes.solver.search_control import SearchControl, SearchProgress
from passes.solver.smallest_peak import choice_of_smallest_peak
from tests.passes.solver.drawn_assignments import assignments
from tests.passes.solver.exhaustive import solve_exhaustive


def usage_of(problem: Assignment):
    """Return the bytes in use at each row of a problem, as if rows were program points."""
    return lambda choice: np.array([row.bytes_of(choice, problem.edges) for row in problem.rows] or [0.0])


@given(assignments())
def test_the_bound_holds_and_small_problems_are_solved(problem: Assignment) -> None:
    """On drawn problems, the bound is at most the optimum, and the found choice fits and is within the tolerance."""
    check_search(problem, usage_of(problem), problem.rows)


def check_search(problem: Assignment, usage: Usage, rows: Sequence[MemoryRow]) -> None:
    """Check a search against all choices: its bound is at most the optimum, and its choice fits and is as cheap."""
    best = solve_exhaustive(problem)
    search = DualSearch(max_rounds=12)
    found = search(problem, usage, rows.__getitem__)
    if best is None:
        assert found is None or not np.isfinite(found.cost)
        return
    assert found is not None
    assert found.lower_bound <= best.cost * (1 + 1e-9) + 1e-15
    assert best.cost * (1 - 1e-9) - 1e-15 <= found.cost <= best.cost / (1 - search.tolerance) + 1e-15
    assert problem.fits(found.choice)


@given(assignments())
def test_large_problems_combine_seen_choices(problem: Assignment) -> None:
    """If only options of seen choices are combined, the bound holds, and a found choice fits."""
    best = solve_exhaustive(problem)
    with replaced({(merge_choices, "_SMALL"): -1}):
        found = DualSearch(max_rounds=12)(problem, usage_of(problem), lambda point: problem.rows[point])
    if found is not None:
        assert best is not None
        assert found.lower_bound <= best.cost * (1 + 1e-9) + 1e-15
        assert best.cost <= found.cost * (1 + 1e-9) + 1e-15
        assert problem.fits(found.choice)


@given(assignments())
def test_a_stopped_search_has_a_bound_and_shows_what_holds(problem: Assignment) -> None:
    """A search stopped after one round has a true bound, and each report's bound and best enclose the optimum."""
    best = solve_exhaustive(problem)
    shown: list[SearchProgress] = []
    for control in (SearchControl(shown.append, is_stopped=True), SearchControl(shown.append)):
        search = DualSearch(max_rounds=6, control=control)
        found = search(problem, usage_of(problem), lambda point: problem.rows[point])
        if best is not None and found is not None:
            assert found.lower_bound <= best.cost * (1 + 1e-9) + 1e-15
            assert problem.fits(found.choice)
    if best is not None:
        for item in shown:
            assert item.lower_bound <= best.cost * (1 + 1e-9) + 1e-15
            assert best.cost <= item.best * (1 + 1e-9) + 1e-15


@given(assignments(with_memory=False))
def test_messages_never_bound_from_above(problem: Assignment) -> None:
    """Every message-passing round returns a bound of at most the optimum, and no improved choice beats the optimum."""
    best = solve_exhaustive(problem)
    messages = Messages(problem)
    for _ in range(5):
        bound, choice = messages.iterate()
        if best is not None:
            assert bound <= best.cost * (1 + 1e-9) + 1e-15
            assert problem.cost_of(messages.improve(choice)) >= best.cost * (1 - 1e-9) - 1e-15


@given(assignments())
def test_the_choice_of_the_smallest_peak_is_allowed(problem: Assignment) -> None:
    """The choice of the smallest peak has a finite cost, if it is found."""
    choice = choice_of_smallest_peak(problem, usage_of(problem), lambda point: _row(problem, point))
    if choice:
        assert np.isfinite(problem.cost_of(choice))


@given(assignments(), st.floats(0.0, 2.0))
def test_what_is_called_hopeless_does_not_fit(problem: Assignment, share: float) -> None:
    """If the search for a small peak gives up on a limit, no choice fits the limit."""
    limit = share * problem.limit if np.isfinite(problem.limit) else share
    without, early = (
        choice_of_smallest_peak(problem, usage_of(problem), lambda point: _row(problem, point), 0.0, hopeless)
        for hopeless in (np.inf, limit)
    )
    assert early in ((), without)
    if without and not early:
        assert solve_exhaustive(dataclasses.replace(problem, limit=limit)) is None


def _row(problem: Assignment, point: int):
    return problem.rows[point] if problem.rows else MemoryRow(0.0, {}, {})


def test_a_choice_that_nearly_fits_is_changed() -> None:
    """After one round, the options that cost least per saved byte make a choice fit."""
    costs = tuple(np.array([0.0, price]) for price in (1.0, 2.0, 5.0))
    row = MemoryRow(0.0, {variable: np.array([10.0, 1.0]) for variable in range(3)}, {})
    problem = Assignment(costs, (Edge(0, 1, np.zeros((2, 2))),), (row,), limit=15.0)
    found = DualSearch(max_rounds=1)(problem, usage_of(problem), lambda point: row)
    assert found is not None
    assert (found.choice, found.cost) == ((1, 1, 0), 3.0)


def test_a_merge_never_takes_a_forbidden_option() -> None:
    """A merge never takes a forbidden option, although it would save most bytes, and fails if no other helps."""
    costs = (np.array([0.0, np.inf]), np.array([0.0, 3.0]), np.array([0.0, 9.0]))
    row = MemoryRow(0.0, {0: np.array([10.0, 0.0]), **dict.fromkeys((1, 2), np.array([10.0, 9.0]))}, {})
    edges = (Edge(0, 1, np.zeros((2, 2))), Edge(1, 2, np.zeros((2, 2))))
    for limit, wanted in ((29.0, ((0, 1, 0), 3.0)), (28.0, ((0, 1, 1), 12.0)), (19.0, None)):
        problem = Assignment(costs, edges, (row,), limit=limit)
        found = DualSearch(max_rounds=1)(problem, usage_of(problem), lambda point: row)
        assert (None if found is None else (found.choice, found.cost)) == wanted


def test_a_merge_ends_where_each_change_only_moves_the_peak() -> None:
    """If each option of a variable exceeds the limit at one of two points, a merge ends early without a result."""
    sizes = np.array([100.0, 90.0])
    rows = [MemoryRow(0.0, {0: each}, {}) for each in (sizes, sizes[::-1])]
    problem = Assignment((np.zeros(2), np.zeros(2)), (Edge(0, 1, np.zeros((2, 2))),), tuple(rows), limit=95.0)
    control = SearchControl.within(1.0)
    assert DualSearch(max_rounds=1, control=control)(problem, usage_of(problem), rows.__getitem__) is None
    assert not control.ceiling.has_cut
