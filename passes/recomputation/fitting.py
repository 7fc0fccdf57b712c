"""Search until a choice is found that fits by the count of its lowered program.

A search counts memory by tables, about. Where the tables count too little, the search is repeated with as many bytes
less to spend. Where they count too much, the search may find nothing: the choice that is smallest by their count may
still fit.
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
    """A choice of strategies, whose cost is with what is recomputed and offloaded, and what that is.

    Args:
        planning: the problem of the program that does so; its variables are those of the one that does not.
        solution: one option per variable.
        again: what is recomputed and offloaded.
        recomputable, offloadable: how many nodes might have been.
        host_bytes: what the host holds for each rank.
        counted_bytes: the most bytes in use on each rank as the search counted; infinite where that does not matter.
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
    """A choice that a search finds and that fits; where none does, bytes that would do, None if unknown.

    A search within these bytes finds something that fits, if only what is frugal.

    Args:
        attempt: the cheapest choice within so many bytes as the search counts; `DoesNotFitError` if there is
            none.
        frugal: choices that take little, the same whenever it is asked.
        limit: bytes on each rank.
        control: once it is over nothing more is attempted than the first.
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
"""Searches until one fits."""


def bounded(found: JointSolution, bound: float) -> JointSolution:
    """What was found, with another bound."""
    bound = min(found.solution.cost, bound)
    return dataclasses.replace(found, solution=dataclasses.replace(found.solution, lower_bound=bound))
