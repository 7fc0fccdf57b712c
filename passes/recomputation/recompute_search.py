"""Search strategies, recomputation and offload together.

Recomputation and offload only add time: the second runs of calls and reshards, and copies to and from the host. So a
choice of strategies that is optimal without a memory limit, and that fits as it is, is optimal with them too. The
larger problem is built only for other cases (`solve_jointly`). The best choice that fits without recomputation would
not be enough, because a cheaper choice may fit with recomputation.

The lowered program decides whether a choice fits, so the search is repeated until its choice does (`fitting`). If
memory
binds, the bound holds for plans that fit by the search's tables.

With offload the problem is larger, and includes the problem without. The search is repeated without offload if the gap
is large, or if the host lacks memory. The cheaper choice that fits is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from autoshard.errors import DoesNotFitError
from passes.planning.build_assignment import PlanningProblem
from passes.planning.search import Search, Searchable, restrict
from passes.recomputation.fitting import JointSolution, PeakOf, bounded, fitting
from passes.recomputation.recompute_options import OFFLOADED, RECOMPUTED, find_options
from passes.recomputation.recompute_problem import RecomputeProblem, build_recompute_problem
from passes.recomputation.with_restored import host_bytes, with_restored
from passes.solver.assignment import Solution
from passes.solver.dual_search import DualSearch
from passes.solver.search_control import SearchStopped
from passes.solver.smallest_peak import choice_of_smallest_peak


def solve_jointly(
    planning: PlanningProblem,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    start: Sequence[Solution],
    peak_of: PeakOf,
    *,
    recompute: bool = True,
    offload: bool = True,
    before: JointSolution | None = None,
) -> JointSolution:
    """Return a cheapest choice of strategies, recomputation and offload that fits; see the module's docstring.

    Args:
        planning: the problem without recomputation.
        search: the search, with the memory limit.
        allowed: variable to a mask of its options; absent variables are free.
        start: solutions without recomputation; the result is no worse than those that fit.
        peak_of: counts lowered programs.
        recompute: whether values may be recomputed; without recomputation, no offload.
        offload: whether values may go to the host, on devices with a link to a host.
        before: a known solution; the result is no worse, if it fits.

    Raises:
        DoesNotFitError: no choice fits with any recomputation and offload.
    """
    if before is None or not _is_within(before, planning, search, peak_of):
        return _solve_jointly(planning, search, allowed, start, peak_of, recompute=recompute, offload=offload)
    try:
        found = _solve_jointly(planning, search, allowed, start, peak_of, recompute=recompute, offload=offload)
    except DoesNotFitError:
        return bounded(before, 0.0)
    return bounded(_cheaper(found, before), found.solution.lower_bound)


def _is_within(found: JointSolution, planning: PlanningProblem, search: Search, peak_of: PeakOf) -> bool:
    """Whether a solution fits, in the host's memory too."""
    limit, room = search.memory_limit_bytes, planning.prices.cluster.host_bytes_per_device
    return (limit is None or found.peak_bytes(peak_of) <= limit) and (room is None or found.host_bytes <= room)


def _solve_jointly(
    planning: PlanningProblem,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    start: Sequence[Solution],
    peak_of: PeakOf,
    *,
    recompute: bool,
    offload: bool,
) -> JointSolution:
    """Do `solve_jointly` without a known solution."""
    if not recompute:
        return _alone(planning, search, allowed, start, peak_of)
    unlimited = dataclasses.replace(search, memory_limit_bytes=None, fineness=_FINENESS)
    free = JointSolution(planning, unlimited(planning, allowed, start))
    if search.memory_limit_bytes is None or free.peak_bytes(peak_of) <= search.memory_limit_bytes:
        return free
    start = [each for each in start if peak_of(planning, each.choice) <= search.memory_limit_bytes]
    coarse, bound = dataclasses.replace(search, tolerance=_TOLERANCE), free.solution.lower_bound
    found = _where_memory_binds(planning, coarse, allowed, start, peak_of, offload=offload)
    # strategies and policies cost no less in less memory
    return bounded(found, max(found.solution.lower_bound, bound))


def _where_memory_binds(
    planning: PlanningProblem,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    start: Sequence[Solution],
    peak_of: PeakOf,
    *,
    offload: bool,
) -> JointSolution:
    """Do `solve_jointly` if the cheapest choice does not fit."""
    if search.control.is_stopped or (start and search.control.is_over()):
        # the bound of the search without recomputation does not hold for other choices
        return bounded(_alone(planning, search, allowed, start, peak_of), 0.0)
    if not offload or planning.prices.cluster.device.host_link is None:
        return _solve(planning, search, allowed, start, peak_of, offload=False)
    room = planning.prices.cluster.host_bytes_per_device
    try:
        found = _solve(planning, search, allowed, start, peak_of, offload=True)
    except DoesNotFitError:
        if room is None or _most_host_bytes(planning) <= room:
            raise
        return _solve(planning, search, allowed, start, peak_of, offload=False)
    has_room = room is None or found.host_bytes <= room
    is_near = found.solution.cost * (1 - _FAR) <= found.solution.lower_bound
    if has_room and (is_near or search.control.is_over()):
        return found
    try:
        other = _solve(planning, search, allowed, start, peak_of, offload=False)
    except DoesNotFitError:
        if has_room:
            return found
        raise
    is_better = not has_room or other.solution.cost < found.solution.cost
    return bounded(other if is_better else found, found.solution.lower_bound)


def _most_host_bytes(planning: PlanningProblem) -> int:
    """The most bytes that any plan may offload: all values of the forward, whole."""
    results = (item for site in planning.space.sites.values() if site.phase == "forward" for item in site.results)
    return sum(math.prod(item.shape) * item.itemsize for item in results)


_FAR = 0.05
"""Gap up to which the search is not repeated. At gaps of 2 to 5 %, repeating it gained nothing; at 11 %, less than 0.1
%.
"""


def _solve(
    planning: PlanningProblem,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    start: Sequence[Solution],
    peak_of: PeakOf,
    *,
    offload: bool,
) -> JointSolution:
    """Do `solve_jointly` if memory binds; the host's memory has no limit."""
    assert search.memory_limit_bytes is not None, "without a limit nothing is recomputed"

    options = find_options(planning, offload=offload)
    if not options.policies:
        return _alone(planning, search, allowed, start, peak_of)
    try:
        with search.control.building():
            problem = build_recompute_problem(planning, options, control=search.control if start else None)
    except SearchStopped:
        return bounded(_alone(planning, search, allowed, start, peak_of), 0.0)

    wide = problem.widen(allowed)

    def attempt(limit: float) -> JointSolution:
        """Return the cheapest choice that fits in a limit by the problem's tables."""
        return _joint(problem, _within(limit, search)(problem, wide, start))

    frugal = partial(_frugal, problem, search, wide, partial(_joint, problem), peak_of)
    found, least = fitting(attempt, frugal, search.memory_limit_bytes, search.control, peak_of)
    bound = 0.0 if found is None else found.solution.lower_bound
    for solution in start:  # these may not fit in the last attempt's smaller limit
        found = _cheaper(found, JointSolution(planning, solution))
    if found is None:
        raise search.does_not_fit(planning, least)
    return bounded(found, bound)


def _joint(problem: RecomputeProblem, found: Solution) -> JointSolution:
    """Return the plan of a choice of a problem with recomputation."""
    restored, choice = problem.restored(found.choice), problem.without_policies(found.choice)
    running, counts = with_restored(problem.planning, restored), problem.planning.counts()
    return JointSolution(
        running,
        Solution(choice, found.cost, found.lower_bound),
        restored,
        problem.options.candidates(RECOMPUTED, counts),
        problem.options.candidates(OFFLOADED, counts),
        host_bytes(running, choice),
        float(problem.usage(found.choice).max()),
    )


def _cheaper(found: JointSolution | None, other: JointSolution) -> JointSolution:
    """Return the cheaper of two solutions; the first may be None."""
    return other if found is None or other.solution.cost < found.solution.cost else found


def _alone(
    planning: PlanningProblem,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    start: Sequence[Solution],
    peak_of: PeakOf,
) -> JointSolution:
    """Return the cheapest choice that fits without recomputation."""
    if search.memory_limit_bytes is None:
        return JointSolution(planning, search(planning, allowed, start))

    def attempt(limit: float) -> JointSolution:
        return JointSolution(planning, _within(limit, search)(planning, allowed, start))

    frugal = partial(_frugal, planning, search, allowed, partial(JointSolution, planning), peak_of)
    found, least = fitting(attempt, frugal, search.memory_limit_bytes, search.control, peak_of)
    if found is None:
        raise search.does_not_fit(planning, least)
    return found


def _frugal(
    problem: Searchable,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    joint: Callable[[Solution], JointSolution],
    peak_of: PeakOf,
) -> list[JointSolution]:
    """Return choices of small memory: a choice of a small peak by the problem's tables, and a cheap choice within
    it.
    """
    free = restrict(problem.assignment, allowed)
    found = choice_of_smallest_peak(free, problem.usage, problem.memory_row, control=search.control)
    if not found:
        return []
    rough = joint(Solution(found, free.cost_of(found), 0.0))
    if search.control.is_stopped or rough.peak_bytes(peak_of) > _NEAR * (search.memory_limit_bytes or 0):
        return [rough]
    quick = DualSearch(search.tolerance, _ROUNDS, control=search.control)
    peak = float(problem.usage(found).max())
    cheap = quick(dataclasses.replace(free, limit=peak), problem.usage, problem.memory_row, [found])
    return [rough] if cheap is None else [rough, joint(cheap)]


_NEAR = 1.1
"""Multiple of the limit up to which a cheap choice is sought within a small peak; this choice might fit, too."""


def _within(limit: float, search: Search) -> Search:
    """Return the search within another limit."""
    return dataclasses.replace(search, memory_limit_bytes=limit, says_smallest=False)


_FINENESS = 0.1
"""Without a limit, a finer search takes little longer."""

_TOLERANCE = 0.01
"""Gap at which the search ends if memory binds: no finer than prices are, and soon reached."""

_ROUNDS = 12
"""Rounds of the quick search for a cheap choice of small memory."""
