"""Searches until the lowered program of a choice fits.

A search counts memory by tables, approximately. If the tables count too little, the search is repeated with a lower
limit. If they count too much, the search may find nothing. Then the choice with the smallest peak by the tables is
tried, since the lowered program may still fit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard.errors import DoesNotFitError
from passes.planning.build_assignment import PlanningProblem
from passes.recomputation.recompute_problem import NOTHING_RESTORED, Restored
from passes.solver.assignment import Solution
from passes.solver.search_control import SearchControl

PeakOf = Callable[[PlanningProblem, Sequence[int]], float]
"""The most bytes in use on each rank under a choice of a problem: of its lowered program."""


@dataclass(frozen=True, slots=True)
class JointSolution:
    """A choice of strategies with its recomputed and offloaded values, which are in its cost.

    Args:
        planning: the problem of the program with recomputation and offload; variables are those of the original
            problem.
        solution: one option per variable.
        restored: the recomputed and offloaded values.
        recomputable, offloadable: the count of nodes with that option.
        host_bytes: host memory in use for each rank.
        counted_bytes: each rank's peak by the search's tables; infinite if there is no limit.
    """

    planning: PlanningProblem
    solution: Solution
    restored: Restored = NOTHING_RESTORED
    recomputable: int = 0
    offloadable: int = 0
    host_bytes: float = 0.0
    counted_bytes: float = math.inf

    def peak_bytes(self, peak_of: PeakOf) -> float:
        """The most bytes in use on each rank, by the lowered program."""
        return peak_of(self.planning, self.solution.choice)


def fitting(
    attempt: Callable[[float], JointSolution],
    frugal: Callable[[], Sequence[JointSolution]],
    limit: float,
    control: SearchControl,
    peak_of: PeakOf,
) -> tuple[JointSolution | None, float | None]:
    """A choice that a search finds and that fits; else None, and bytes that would suffice (None if unknown).

    A search within these bytes finds a choice that fits, at least a frugal one.

    Args:
        attempt: the cheapest choice within a number of bytes by the tables; raises `DoesNotFitError` if there is none.
        frugal: choices with a small peak, the same at every call.
        limit: bytes on each rank.
        control: after its end only the first attempt runs.
        peak_of: counts lowered programs.
    """
    asked, bound = limit, None
    for _ in range(_ATTEMPTS):
        try:
            found = attempt(asked)
        except DoesNotFitError:
            break
        bound = found.solution.lower_bound if bound is None else bound
        excess = found.peak_bytes(peak_of) - limit
        if excess <= 0:
            return bounded(found, bound), None
        if control.is_over():
            break
        asked = min(asked, found.counted_bytes) - excess
    peaks = [(choice.peak_bytes(peak_of), choice) for choice in frugal()]
    fits = [choice for peak, choice in peaks if peak <= limit]
    if fits:
        return bounded(min(fits, key=lambda choice: choice.solution.cost), bound or 0.0), None
    return None, min((peak for peak, _ in peaks), default=None)


_ATTEMPTS = 6
"""The number of searches until one fits."""


def bounded(found: JointSolution, bound: float) -> JointSolution:
    """The same solution with another bound."""
    bound = min(found.solution.cost, bound)
    return dataclasses.replace(found, solution=dataclasses.replace(found.solution, lower_bound=bound))
