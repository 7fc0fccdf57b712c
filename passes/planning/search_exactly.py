"""Search small problems to the proven optimum of all that fits by the exact count.

Memory binds at few program points, and which ones is not known before. So rows are added as the search goes: solve;
count exactly what the solution takes; where that is over the limit, add rows that are exact for this solution, and true
of all others (`exact_rows`); solve again. Each problem that is solved is a relaxation of the true one, and what it
solves to is cut off if it does not fit: so the first solution that fits is optimal, and if nothing solves nothing fits.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from passes.planning.build_assignment import PlanningProblem
from passes.planning.exact_memory import memory_of
from passes.planning.exact_rows import ExactRows
from passes.planning.search import Search, Searchable, highest_over, restrict
from passes.solver.assignment import Assignment, Floats, MemoryRow, Solution
from passes.solver.search_control import SearchControl
from passes.solver.solve_milp import solve_milp


class Counted(Protocol):
    """The exact count of memory under one choice."""

    def used(self) -> Floats:
        """Bytes in use on each rank at every program point, [points]."""
        ...

    def row(self, point: int) -> MemoryRow:
        """A row that is exact for the choice at one point, and counts no more than there is under all others."""
        ...


class ExactlyCounted(Protocol):
    """A problem whose memory is counted exactly, one choice at a time."""

    @property
    def tables(self) -> Searchable:
        """The same problem, whose memory is counted by tables."""
        ...

    @property
    def assignment(self) -> Assignment:
        """The problem, without memory rows."""
        ...

    def counted(self, choice: Sequence[int]) -> Counted:
        """The count under a choice."""
        ...


@dataclass(frozen=True, slots=True)
class CountedPlan:
    """The exact count under a choice of strategies."""

    planning: PlanningProblem
    rows: ExactRows

    def used(self) -> Floats:
        """See `Counted`."""
        return memory_of(self.rows.walk).used()

    def row(self, point: int) -> MemoryRow:
        """See `Counted`."""
        return self.rows.at(point, self.planning.edge_between)


@dataclass(frozen=True, slots=True)
class ExactPlanning:
    """The problem of a program without elided units, counted exactly."""

    planning: PlanningProblem

    @property
    def tables(self) -> PlanningProblem:
        """See `ExactlyCounted`."""
        return self.planning

    @property
    def assignment(self) -> Assignment:
        """See `ExactlyCounted`."""
        return self.planning.assignment

    def counted(self, choice: Sequence[int]) -> CountedPlan:
        """See `ExactlyCounted`."""
        return CountedPlan(self.planning, ExactRows(self.planning, choice))


@dataclass(slots=True)
class ExactSearch:
    """A search for the cheapest choice that fits, or the one of the smallest peak.

    Args:
        exact: counts the memory of a choice.
        problem: its assignment, maybe restricted, with a limit; and the rows so far.
        deadline: of `time.monotonic`.
        control: told the bound; may stop the search.
    """

    exact: ExactlyCounted
    problem: Assignment
    deadline: float
    control: SearchControl

    def cheapest(self) -> Solution | None:
        """The cheapest choice that fits, None if none does.

        Raises:
            TimeoutError: nothing that fits was found in time.
        """
        while True:
            left_s = self.deadline - time.monotonic()
            if left_s <= 0 or self.control.is_stopped:
                raise TimeoutError("the exact search ran out of time before it found a plan that fits")
            solution = solve_milp(self.problem, time_limit_s=left_s, control=self.control)
            if solution is None or self._fits(solution.choice, self.problem.limit):
                return solution

    def smallest_peak(self, frugal: Sequence[int]) -> float:
        """The smallest limit within which a choice fits, bytes; if time is up, one in which some choice does.

        Args:
            frugal: a choice with a small peak: whether another one fits in less is found out.
        """
        choice = tuple(frugal)
        while True:
            peak = float(self.exact.counted(choice).used().max())
            self.problem = dataclasses.replace(self.problem, limit=np.ceil(peak) - 1)
            try:
                found = self.cheapest()
            except TimeoutError:
                return peak
            if found is None:
                return peak
            choice = found.choice

    def _fits(self, choice: Sequence[int], limit: float) -> bool:
        """Whether a choice fits in a limit; if not, rows are added that cut it off."""
        counted = self.exact.counted(choice)
        rows = tuple(counted.row(point) for point in highest_over(counted.used(), limit))
        self.problem = dataclasses.replace(self.problem, rows=(*self.problem.rows, *rows))
        return not rows


MOST_PAIRS = 1_500
"""Pairs of options over all edges up to which problems are searched so: of five times as many it took up to 20 s."""

_SHARE = 0.5
"""The part of the time that is left which is spent so; the rest is for a search by tables."""


def is_searched_exactly(problem: Assignment) -> bool:
    """Whether a problem is small enough."""
    return sum(edge.cost.size for edge in problem.edges) <= MOST_PAIRS


def cheapest_that_fits(
    exact: ExactlyCounted, search: Search, allowed: Mapping[int, np.ndarray], deadline: float
) -> Solution:
    """The cheapest choice that fits in the memory limit of a search.

    Args:
        exact: the problem.
        search: with a memory limit.
        allowed: variable to a mask of its options; absent variables are free.
        deadline: of `time.monotonic`, for all that is searched.

    Raises:
        DoesNotFitError: no choice fits; says the smallest limit that one would fit in.
        TimeoutError: nothing that fits was found in time.
    """
    assert search.memory_limit_bytes is not None, "without a limit nothing is counted"
    problem = dataclasses.replace(restrict(exact.assignment, allowed), limit=float(search.memory_limit_bytes))
    now = time.monotonic()
    exactly = ExactSearch(exact, problem, now + _SHARE * (deadline - now), search.control)
    found = exactly.cheapest()
    if found is None:
        frugal = search.frugal(exact.tables, problem)
        raise search.does_not_fit(exact.tables, exactly.smallest_peak(frugal) if frugal else np.inf)
    return found
