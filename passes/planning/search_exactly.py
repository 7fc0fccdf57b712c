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
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from passes.planning.build_assignment import PlanningProblem
from passes.planning.exact_memory import memory_of
from passes.planning.exact_rows import ExactRows
from passes.planning.search import Search, Searchable, restrict
from passes.solver.assignment import Assignment, Floats, MemoryRow, Solution, row_against
from passes.solver.least_peak import Counted, LeastPeak, PeakSearch, highest_over
from passes.solver.search_control import SearchControl
from passes.solver.smallest_peak import choice_of_smallest_peak
from passes.solver.solve_milp import solve_milp


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
        refused: choices that did not fit, whose rows the problem has.
    """

    exact: ExactlyCounted
    problem: Assignment
    deadline: float
    control: SearchControl
    refused: set[tuple[int, ...]] = field(default_factory=set)

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

    def smallest_peak(self, frugal: Sequence[int]) -> LeastPeak | None:
        """The smallest limit within which a choice fits, with proof if there is time for it; see `PeakSearch`.

        Args:
            frugal: a choice with a small peak, or nothing.
        """
        return PeakSearch(self.problem, self.exact.counted, self.exact.tables.usage, self.deadline, self.control)(
            frugal
        )

    def _fits(self, choice: Sequence[int], limit: float) -> bool:
        """Whether a choice fits in a limit; if not, rows are added that cut it off."""
        counted = self.exact.counted(choice)
        rows = [counted.row(point) for point in highest_over(counted.used(), limit)]
        if rows and choice in self.refused:
            rows = [row_against(choice, self.problem.costs, limit)]
        self.refused.add(tuple(choice))
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
    if found is not None:
        return found
    rough = choice_of_smallest_peak(problem, exact.tables.usage, exact.tables.memory_row, control=search.control)
    least = exactly.smallest_peak(rough)
    if least is None:
        raise search.does_not_fit(exact.tables)
    raise search.does_not_fit(exact.tables, least.peak, is_proven=least.is_proven)
