"""Search strategies, recomputation and offload together.

Recomputation and offload only add time: second runs of calls and reshards, and copies to and from the host. So if the
best choice of strategies without a memory limit fits, it is also the best choice with recomputation and offload.
Otherwise the larger problem is built (`solve_jointly`). The best choice that fits without recomputation would not be
enough, because a cheaper choice may fit with recomputation.

The lowered program decides whether a choice fits, so the search is repeated until its choice does (`fitting`). If
memory binds, the lower bound holds for plans that fit by the search's tables.

The problem with offload is larger, and includes the problem without offload. The search is repeated without offload if
the gap to the lower bound is large, or if the host lacks memory. The cheaper choice that fits is taken.
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
from passes.recomputation.recompute_options import OFFLOADED, RECOMPUTED, RecomputeOptions, find_options
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
    """Return the cheapest found choice of strategies, recomputation and offload that fits in memory.

    Args:
        planning: the problem without recomputation.
        search: the search, with the memory limit.
        allowed: variable → a boolean mask of its allowed options. All options of absent variables are allowed.
        start: solutions without recomputation. The result costs no more than any of these solutions that fits.
        peak_of: counts the memory of a choice on its lowered program.
        recompute: whether values may be recomputed. Without recomputation nothing is offloaded.
        offload: whether values may go to the host, on devices with a link to a host.
        before: a known solution. If this solution fits, the result costs no more.

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
    """Whether a solution fits in the device's memory limit and in the host's memory."""
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
    """Return the result of `solve_jointly` without a known solution."""
    if not recompute:
        return _alone(planning, search, allowed, start, peak_of)
    finer = search.tolerance * _FINENESS if search.is_thorough else search.tolerance
    unlimited = dataclasses.replace(search, memory_limit_bytes=None, tolerance=finer)
    free = JointSolution(planning, unlimited(planning, allowed, start))
    if search.memory_limit_bytes is None or free.peak_bytes(peak_of) <= search.memory_limit_bytes:
        return free
    start = [each for each in start if peak_of(planning, each.choice) <= search.memory_limit_bytes]
    coarse, bound = dataclasses.replace(search, tolerance=_TOLERANCE), free.solution.lower_bound
    found = _where_memory_binds(planning, coarse, allowed, start, peak_of, offload=offload)
    # a memory limit never makes the best choice cheaper
    return bounded(found, max(found.solution.lower_bound, bound))


ROOM = 0.05
"""Share of the memory limit that `solve_with_room` leaves to collectives that run beside computation.

A choice that fills the memory leaves none for a gather ahead of its use. Llama-3 8B was planned for 64 H100s at 35 % of
their memory (2026-11-30). Shares of 0, 0.02, 0.05, 0.1 and 0.15 gave steps of 1.254, 1.201, 1.138, 1.142 and 1.149 s.
"""


def solve_with_room(
    found: JointSolution,
    planning: PlanningProblem,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    start: Sequence[Solution],
    peak_of: PeakOf,
    *,
    recompute: bool,
    offload: bool,
) -> JointSolution | None:
    """Return the cheapest choice found within a memory limit that is smaller by the fraction `ROOM`.

    `found` is the result of `solve_jointly`, with the same other arguments. The result is None if `found` fits in the
    smaller limit, or if no choice does. It is also None if time is up, or without a memory limit.
    """
    if search.memory_limit_bytes is None or search.control.is_over():
        return None
    limit = (1 - ROOM) * search.memory_limit_bytes
    if found.peak_bytes(peak_of) <= limit:
        return None
    smaller = dataclasses.replace(search, memory_limit_bytes=limit, tolerance=_TOLERANCE, says_smallest=False)
    start = [each for each in start if peak_of(planning, each.choice) <= limit]
    try:
        if not recompute:
            return _alone(planning, smaller, allowed, start, peak_of)
        return _where_memory_binds(planning, smaller, allowed, start, peak_of, offload=offload)
    except DoesNotFitError:
        return None


def _where_memory_binds(
    planning: PlanningProblem,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    start: Sequence[Solution],
    peak_of: PeakOf,
    *,
    offload: bool,
) -> JointSolution:
    """Return the result of `solve_jointly` if the cheapest choice without recomputation does not fit."""
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
    """Return an upper bound of the bytes that any plan may offload on a rank: all values of the forward, unsplit."""
    results = (item for site in planning.space.sites.values() if site.phase == "forward" for item in site.results)
    return sum(math.prod(item.shape) * item.itemsize for item in results)


_FAR = 0.05
"""Relative gap to the lower bound up to which the search is not repeated without offload.

At gaps of 2 to 5 %, repeating it gained nothing; at 11 %, less than 0.1 %.
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
    """Return the result of `solve_jointly` if memory binds. The memory of the host is taken to be unlimited."""
    assert search.memory_limit_bytes is not None, "without a limit nothing is recomputed"

    options = find_options(planning, offload=offload)
    if not options.policies:
        return _alone(planning, search, allowed, start, peak_of)
    try:
        problem = _problem(planning, search, options, may_stop=bool(start), offload=offload)
    except SearchStopped:
        return bounded(_alone(planning, search, allowed, start, peak_of), 0.0)

    wide = problem.widen(allowed)

    def attempt(limit: float) -> JointSolution:
        return _joint(problem, _within(limit, search)(problem, wide, start))

    frugal = partial(_frugal, problem, search, wide, partial(_joint, problem), peak_of)
    found, least = fitting(attempt, frugal, search.memory_limit_bytes, search.control, peak_of)
    bound = 0.0 if found is None else found.solution.lower_bound
    for solution in start:  # they fit in the memory limit, but maybe not in the last attempt's smaller limit
        found = _cheaper(found, JointSolution(planning, solution))
    if found is None:
        raise search.does_not_fit(planning, least)
    return bounded(found, bound)


def _problem(
    planning: PlanningProblem, search: Search, options: RecomputeOptions, *, may_stop: bool, offload: bool
) -> RecomputeProblem:
    """Return the problem with recomputation. It is built at the first call, and then serves all memory limits.

    With `may_stop`, `SearchStopped` is raised if time is up before it is built. `offload` says whether `options` has
    offload.
    """
    known: dict[bool, RecomputeProblem] = planning.derived.setdefault(_PROBLEMS, {})
    if offload not in known:
        with search.control.building():
            known[offload] = build_recompute_problem(planning, options, control=search.control if may_stop else None)
    return known[offload]


_PROBLEMS = "problems with recomputation"
"""Key of `PlanningProblem.derived` for problems with recomputation, by whether they have offload."""


def forget_problems(planning: PlanningProblem) -> None:
    """Free the problems that searches of `planning` built, whose tables may take gigabytes."""
    planning.derived.pop(_PROBLEMS, None)


def _joint(problem: RecomputeProblem, found: Solution) -> JointSolution:
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
    return other if found is None or other.solution.cost < found.solution.cost else found


def _alone(
    planning: PlanningProblem,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    start: Sequence[Solution],
    peak_of: PeakOf,
) -> JointSolution:
    """Return the cheapest choice without recomputation that fits in memory.

    The result costs no more than any solution in `start` that fits.

    Raises:
        DoesNotFitError: no such choice fits.
    """
    if search.memory_limit_bytes is None:
        return JointSolution(planning, search(planning, allowed, start))

    def attempt(limit: float) -> JointSolution:
        return JointSolution(planning, _within(limit, search)(planning, allowed, start))

    frugal = partial(_frugal, planning, search, allowed, partial(JointSolution, planning), peak_of)
    found, least = fitting(attempt, frugal, search.memory_limit_bytes, search.control, peak_of)
    bound = 0.0 if found is None else found.solution.lower_bound
    for solution in start:
        is_cheaper = found is None or solution.cost < found.solution.cost
        if is_cheaper and peak_of(planning, solution.choice) <= search.memory_limit_bytes:
            found = JointSolution(planning, solution)
    if found is None:
        raise search.does_not_fit(planning, least)
    return bounded(found, bound)


def _frugal(
    problem: Searchable,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    joint: Callable[[Solution], JointSolution],
    peak_of: PeakOf,
) -> list[JointSolution]:
    """Return one or two choices that need little memory.

    The first choice has nearly the smallest peak by the problem's tables. The second choice is cheap, and has at most
    this peak.
    """
    free = restrict(problem.assignment, allowed)
    found = choice_of_smallest_peak(free, problem.usage, problem.memory_row)
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
"""Largest ratio of the smallest peak to the memory limit at which `_frugal` also searches a cheap choice."""


def _within(limit: float, search: Search) -> Search:
    return dataclasses.replace(search, memory_limit_bytes=limit, says_smallest=False)


_FINENESS = 0.1
"""Factor on the tolerance of a thorough search without a memory limit, which takes little longer."""

_TOLERANCE = 0.01
"""Relative gap at which a search within memory ends. Prices are no more exact, and the gap is soon reached."""

_ROUNDS = 12
"""Rounds of the quick search for a cheap choice of small memory."""
