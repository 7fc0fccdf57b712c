"""Search small problems to the proven optimum of all that fits by the exact count.

Memory binds at few program points, and which ones is not known before. So rows are added as the search goes: solve;
count exactly what the solution takes; where that is over the limit, add rows that are exact for this solution, and true
of all others (`exact_rows`); solve again. Each problem that is solved is a relaxation of the true one, and what it
solves to is cut off if it does not fit: so the first solution that fits is optimal, and if nothing solves nothing fits.

Before that, the same is done for the smallest peak, as far as it takes to know whether anything fits (`least_peak`).
That takes far fewer rounds, and gives a choice to fall back on when time runs out.
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
from passes.planning.search import Search, Searchable, restrict
from passes.solver.assignment import Assignment, Floats, MemoryRow, Solution
from passes.solver.least_peak import Counted, LeastPeak, PeakSearch
from passes.solver.row_search import RowSearch
from passes.solver.search_control import SearchControl
from passes.solver.smallest_peak import choice_of_smallest_peak


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
        problem: its assignment, maybe restricted, with a limit.
        deadline: of `time.monotonic`.
        control: told the bound; may stop the search.
        known: seconds that a choice costs which fits, than which others are to be cheaper.
    """

    exact: ExactlyCounted
    problem: Assignment
    deadline: float
    control: SearchControl
    known: float = np.inf

    def cheapest(self) -> tuple[Solution | None, float]:
        """The cheapest choice that fits, None if none is found in time; and seconds that no choice is below."""
        return RowSearch(self.exact.counted, self.problem, self.deadline, self.control, self.known).cheapest()

    def smallest_peak(self, frugal: Sequence[int], enough: float) -> LeastPeak | None:
        """The smallest limit within which a choice fits, with proof if there is time for it; see `PeakSearch`.

        Args:
            frugal: a choice with a small peak, or nothing.
            enough: bytes; a smaller peak is not looked for.
        """
        usage = self.exact.tables.usage
        return PeakSearch(self.problem, self.exact.counted, usage, self.deadline, self.control, enough)(frugal)


MOST_PAIRS = 8_000
"""Pairs of options over all edges up to which the cheapest choice is searched so."""

MOST_PAIRS_TO_PROVE = 200_000
"""Pairs of options up to which what tables found is made cheaper so, or proven to be the cheapest."""

MOST_PAIRS_TO_REFUSE = 200_000
"""Pairs of options up to which it is proven so that nothing fits: whatever choices cost, far fewer differ."""

_SHARE = 0.5
"""The part of the time that is left which is spent so; the rest is for a search by tables."""

_SHARE_TO_REFUSE = 0.1
"""The part of the time in which it is proven that nothing fits, where that is all that is searched so."""


def is_searched_exactly(problem: Assignment) -> bool:
    """Whether a problem is small enough."""
    return _pairs(problem) <= MOST_PAIRS


def is_refused_exactly(problem: Assignment) -> bool:
    """Whether a problem is small enough for `refuse`."""
    return _pairs(problem) <= MOST_PAIRS_TO_REFUSE


def _pairs(problem: Assignment) -> int:
    return sum(edge.cost.size for edge in problem.edges)


def cheapest_that_fits(
    exact: ExactlyCounted, search: Search, allowed: Mapping[int, np.ndarray], deadline: float
) -> Solution:
    """The cheapest choice that fits in the memory limit of a search, or, if time runs out, one that fits.

    Its bound is of all that fit, so it is the cheapest if it costs no more.

    Args:
        exact: the problem.
        search: with a memory limit.
        allowed: variable to a mask of its options; absent variables are free.
        deadline: of `time.monotonic`, for all that is searched.

    Raises:
        DoesNotFitError: no choice fits; says the smallest limit that one would fit in.
        TimeoutError: nothing that fits was found in time.
    """
    exactly = _exact_search(exact, search, allowed, deadline, _SHARE)
    least = _least(exactly, search)
    found, bound = exactly.cheapest()
    if found is not None:
        return found
    if bound == np.inf:
        raise search.does_not_fit(exact.tables, least.peak, is_proven=least.is_proven)
    if least.peak > exactly.problem.limit:
        raise TimeoutError("the exact search ran out of time before it found a plan that fits")
    cost = exactly.problem.cost_of(least.choice)
    return Solution(least.choice, cost, min(cost, bound))


def cheaper_that_fits(
    exact: ExactlyCounted, search: Search, allowed: Mapping[int, np.ndarray], deadline: float, known: float
) -> tuple[Solution | None, float]:
    """The cheapest choice that fits and costs less than a known one; and seconds that no choice that fits is below.

    None where there is no such choice, the bound is then `known`, or where none was found in time.

    Args:
        exact, search, allowed, deadline: as of `cheapest_that_fits`.
        known: seconds.
    """
    exactly = _exact_search(exact, search, allowed, deadline, 1.0)
    exactly.known = known
    return exactly.cheapest()


def refuse(exact: ExactlyCounted, search: Search, allowed: Mapping[int, np.ndarray], deadline: float) -> None:
    """Raise an error if it can be proven, in a part of the time, that no choice fits; see `cheapest_that_fits`."""
    _least(_exact_search(exact, search, allowed, deadline, _SHARE_TO_REFUSE), search)


def _exact_search(
    exact: ExactlyCounted, search: Search, allowed: Mapping[int, np.ndarray], deadline: float, share: float
) -> ExactSearch:
    limit = np.inf if search.memory_limit_bytes is None else float(search.memory_limit_bytes)
    problem = dataclasses.replace(restrict(exact.assignment, allowed), limit=limit)
    now = time.monotonic()
    return ExactSearch(exact, problem, now + share * (deadline - now), search.control)


def _least(exactly: ExactSearch, search: Search) -> LeastPeak:
    """A choice that fits, or the one of the smallest peak that was found in time; an error if no choice fits.

    The error names what is proven to be the least, or else a peak that does not depend on the time there was.
    """
    problem, tables = exactly.problem, exactly.exact.tables
    # not with the limit as what is enough: what is named is to be found again under every limit
    rough = choice_of_smallest_peak(problem, tables.usage, tables.memory_row, control=search.control)
    least = exactly.smallest_peak(rough, problem.limit)
    if least is None:
        raise search.does_not_fit(tables)
    if least.bound < problem.limit + _ROUNDING:
        return least
    if least.is_proven or not rough:
        raise search.does_not_fit(tables, least.peak, is_proven=least.is_proven)
    raise search.does_not_fit(tables, float(exactly.exact.counted(rough).used().max()))


_ROUNDING = 0.5
"""Bytes by which a solver's bound may be wrong: what is counted are whole ones."""
