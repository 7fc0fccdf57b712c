"""Repeat a search until its choice fits in memory, as counted on the lowered program.

A search counts memory by approximate tables. If the tables count too little, the search is repeated with a limit
smaller by the excess. If they count too much, the search may find no choice. Then the choice that is smallest by the
tables may still fit.
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
"""Function of a problem and a choice: the most bytes in use on each rank, counted on the lowered program."""


@dataclass(frozen=True, slots=True)
class JointSolution:
    """A choice of strategies, with the values that are recomputed or offloaded. Its cost in seconds includes both.

    Args:
        planning: the problem of the program that restores values. Its variables are those of the program that keeps all
            values.
        restored: the recomputed and offloaded nodes.
        recomputable, offloadable: number of nodes that could have been recomputed or offloaded.
        host_bytes: bytes of host memory for each rank.
        counted_bytes: the most bytes in use on each rank by the search's tables; infinite if they are not counted.
    """

    planning: PlanningProblem
    solution: Solution
    restored: Restored = NOTHING_RESTORED
    recomputable: int = 0
    offloadable: int = 0
    host_bytes: float = 0.0
    counted_bytes: float = math.inf

    def peak_bytes(self, peak_of: PeakOf) -> float:
        """Return the most bytes in use on each rank, counted on the lowered program."""
        return peak_of(self.planning, self.solution.choice)


def fitting(
    attempt: Callable[[float], JointSolution],
    frugal: Callable[[], Sequence[JointSolution]],
    limit: float,
    control: SearchControl,
    peak_of: PeakOf,
) -> tuple[JointSolution | None, float | None]:
    """Search with smaller and smaller limits until a choice fits in memory, and return (choice, None).

    If no choice is found, the result is (None, bytes). A limit of so many bytes on each rank suffices. The second
    element is None if no such limit is known.

    Args:
        attempt: returns the cheapest choice within a limit by the search's tables, or raises `DoesNotFitError`.
        frugal: returns choices of small memory, the same at each call.
        limit: bytes on each rank.
        control: once it is over, no further attempt is made. The first attempt is always made.
        peak_of: counts the memory of a choice on its lowered program.
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
"""The most searches until one fits."""


def bounded(found: JointSolution, bound: float) -> JointSolution:
    """Return the solution `found` with the lower bound `bound`, in seconds.

    If the solution costs less than `bound`, its cost is the lower bound.
    """
    bound = min(found.solution.cost, bound)
    return dataclasses.replace(found, solution=dataclasses.replace(found.solution, lower_bound=bound))
