"""Make what tables found cheaper by the exact count, or prove that nothing is, in half of the time that is left.

Tables count more than there is, so that a plan that they find may be dearer than one that fits. Where a plan is known,
the exact search is short work, as most options go (`narrow_assignment`): so it comes last, begins with what is known,
and takes problems that are much larger than those for which it comes first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from autoshard.errors import DoesNotFitError
from passes.planning.build_assignment import PlanningProblem
from passes.planning.search import Search
from passes.planning.search_exactly import (
    MOST_PAIRS,
    MOST_PAIRS_TO_PROVE,
    ExactPlanning,
    cheaper_that_fits,
    cheapest_that_fits,
)
from passes.recomputation.exact_recompute import ExactRecompute
from passes.recomputation.fitting import JointSolution, bounded
from passes.recomputation.recompute_options import OFFLOADED, RECOMPUTED, RecomputeOptions, find_options
from passes.recomputation.recompute_problem import RecomputeProblem, build_recompute_problem
from passes.recomputation.with_again import host_bytes, with_again
from passes.solver.assignment import Solution
from passes.solver.search_control import SearchStopped


@dataclass(frozen=True, slots=True)
class ProvePlan:
    """See the module's docstring.

    Args:
        planning: the problem without recomputation.
        search: with the memory limit.
        allowed: variable to a mask of its options; absent variables are free.
        recompute, offload: what values may be, to be held no longer.
        end: of `time.monotonic`.
    """

    planning: PlanningProblem
    search: Search
    allowed: Mapping[int, np.ndarray]
    recompute: bool
    offload: bool
    end: float

    def __call__(self, found: JointSolution) -> JointSolution:
        """What was found, or what is cheaper and fits; where that is proven, with a bound of all that fit."""
        if _is_near(found):
            return found
        exact = self._problem(found)
        if exact is None:
            return found
        now = time.monotonic()
        end, allowed = now + _SHARE * (self.end - now), self._allowed(exact)
        other, bound = cheaper_that_fits(exact, self.search, allowed, end, found.solution.cost)
        if other is None:
            return bounded(found, max(found.solution.lower_bound, bound))
        better = self._joint(exact, other)
        room = self.planning.prices.cluster.host_bytes_per_device
        return bounded(better if room is None or better.host_bytes <= room else found, bound)

    def without_keepings(self, found: JointSolution) -> JointSolution:
        """The same of what fits as if memory were no object, with a bound of all: keepings cost nothing less there."""
        return found if _is_near(found) else replace(self, recompute=False)(found)

    def first(self) -> JointSolution | None:
        """What fits, where tables found nothing; None where nothing is found in time.

        Raises:
            DoesNotFitError: it is proven that nothing fits; says the least memory of any plan.
        """
        exact = self._problem(None)
        if exact is None:
            return None
        with suppress(TimeoutError):
            try:
                found = cheapest_that_fits(exact, self.search, self._allowed(exact), self.end)
            except DoesNotFitError as error:
                if error.is_proven:
                    raise
                return None
            return self(self._joint(exact, found))
        return None

    def _problem(self, found: JointSolution | None) -> ExactPlanning | ExactRecompute | None:
        """The problem, if it is worth it, small enough, and there is time."""
        planning = self.planning
        if planning.elided.sites or self.search.control.is_stopped or time.monotonic() >= self.end:
            return None
        options = self._options() if self.recompute else None
        if not self._is_open(_pairs(planning, options), found):
            return None
        if options is None or not options.keepings:
            return ExactPlanning(planning)
        try:
            with self.search.control.building():
                return ExactRecompute(build_recompute_problem(planning, options, deadline=self.end))
        except SearchStopped:
            return None

    def _is_open(self, pairs: int, found: JointSolution | None) -> bool:
        """Whether there is something to prove: of a small problem, or where memory is no object, it may be already.

        Bounds are of all then.
        """
        if pairs > MOST_PAIRS_TO_PROVE:
            return False
        is_by_tables = pairs > MOST_PAIRS and self.search.memory_limit_bytes is not None
        return is_by_tables or found is None or not found.solution.is_optimal

    def _options(self) -> RecomputeOptions:
        has_host = self.planning.prices.cluster.device.host_link is not None
        return find_options(self.planning.space, self.planning.classes, offload=self.offload and has_host)

    def _allowed(self, exact: ExactPlanning | ExactRecompute) -> Mapping[int, np.ndarray]:
        return self.allowed if isinstance(exact, ExactPlanning) else exact.problem.widen(self.allowed)

    def _joint(self, exact: ExactPlanning | ExactRecompute, found: Solution) -> JointSolution:
        return JointSolution(self.planning, found) if isinstance(exact, ExactPlanning) else joint(exact.problem, found)


def joint(problem: RecomputeProblem, found: Solution) -> JointSolution:
    """What a choice of a problem with recomputation stands for."""
    again, choice = problem.again(found.choice), problem.without_keepings(found.choice)
    running = with_again(problem.planning, again)
    return JointSolution(
        running,
        Solution(choice, found.cost, found.lower_bound),
        again,
        problem.options.candidates(RECOMPUTED),
        problem.options.candidates(OFFLOADED),
        host_bytes(running, choice),
        float(problem.usage(found.choice).max()),
    )


def _is_near(found: JointSolution) -> bool:
    return found.solution.cost <= (1 + _ENOUGH) * found.solution.lower_bound


_ENOUGH = 0.01
"""Gap at which a plan is as good as the best, as a share of its cost: prices are not that exact."""

_SHARE = 0.5
"""The part of the time that is left which is spent so: what was found is there, and few plans are proven later."""


def _pairs(planning: PlanningProblem, options: RecomputeOptions | None) -> int:
    """Pairs of options over all edges, with keepings."""
    keepings = {} if options is None else {variable: len(found) for variable, found in options.keepings.items()}
    return sum(
        edge.cost.size * keepings.get(edge.tail, 1) * keepings.get(edge.head, 1) for edge in planning.assignment.edges
    )
