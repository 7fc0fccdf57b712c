"""The smallest peak of drawn problems: equal to trying every choice, with proof."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from passes.solver.assignment import Assignment, Floats, MemoryRow, row_against
from passes.solver.least_peak import LeastPeak, PeakSearch
from passes.solver.search_control import SearchControl
from tests.passes.solver.test_solve_milp import assignments


@dataclass(frozen=True)
class ByRows:
    """The memory of a problem whose rows are its program points."""

    problem: Assignment
    choice: Sequence[int]

    def used(self) -> Floats:
        return np.array([row.bytes_of(self.choice, self.problem.edges) for row in self.problem.rows])

    def row(self, point: int) -> MemoryRow:
        return self.problem.rows[point]


def search(
    problem: Assignment,
    start: Sequence[int],
    *,
    seconds: float = 60.0,
    is_stopped: bool = False,
    enough: float = 0.0,
) -> LeastPeak | None:
    """The search of a problem whose rows are not known to it."""
    free = Assignment(problem.costs, problem.edges)
    deadline, control = time.monotonic() + seconds, SearchControl(is_stopped=is_stopped)
    counted = partial(ByRows, problem)
    return PeakSearch(free, counted, lambda choice: counted(choice).used(), deadline, control, enough)(start)


def every_choice(problem: Assignment) -> list[tuple[int, ...]]:
    """All that are allowed."""
    choices = product(*(range(len(cost)) for cost in problem.costs))
    return [choice for choice in choices if np.isfinite(problem.cost_of(choice))]


@given(assignments(), st.data())
def test_it_equals_trying_every_choice(problem: Assignment, data: st.DataObject) -> None:
    """From any start or none; the bound is the peak."""
    assume(problem.rows)
    allowed = every_choice(problem)
    start = data.draw(st.sampled_from([(), *allowed]))
    found = search(problem, start, seconds=60.0)
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert found.is_proven
    assert found.choice in allowed
    assert found.peak == ByRows(problem, found.choice).used().max()
    assert found.peak == min(ByRows(problem, choice).used().max() for choice in allowed)


@given(assignments(), st.booleans())
def test_a_search_without_time_gives_a_choice_no_worse_than_its_start(problem: Assignment, is_stopped: bool) -> None:
    """And claims no proof that it has not."""
    assume(problem.rows)
    allowed = every_choice(problem)
    assume(allowed)
    least = min(ByRows(problem, choice).used().max() for choice in allowed)
    found = search(problem, allowed[0], seconds=0.0 if not is_stopped else 60.0, is_stopped=is_stopped)
    assert found is not None
    assert found.choice in allowed
    assert least <= found.peak <= ByRows(problem, allowed[0]).used().max()
    assert found.bound <= least
    with pytest.raises(TimeoutError, match="no plan was found in time"):
        search(problem, (), seconds=0.0)


@given(assignments(), st.data())
def test_a_peak_that_is_small_enough_ends_the_search(problem: Assignment, data: st.DataObject) -> None:
    """Where there is one; the start, if that will do."""
    allowed = every_choice(problem)
    assume(problem.rows and allowed)
    start, other = data.draw(st.sampled_from(allowed)), data.draw(st.sampled_from(allowed))
    enough = float(ByRows(problem, other).used().max())
    found = search(problem, start, enough=enough)
    assert found is not None
    assert found.peak <= enough
    assert search(problem, other, enough=enough) == LeastPeak(other, enough, 0.0)


@given(assignments(), st.data())
def test_a_row_against_a_choice_is_broken_by_no_other(problem: Assignment, data: st.DataObject) -> None:
    """Whatever the limit is."""
    choices = list(product(*(range(len(cost)) for cost in problem.costs)))
    refused, other = data.draw(st.sampled_from(choices)), data.draw(st.sampled_from(choices))
    limit = data.draw(st.sampled_from([1.0, 1e3 + 1, 8e10]))
    row = row_against(refused, problem.costs, limit)
    assert (row.bytes_of(other, problem.edges) <= limit) == (other != refused)
