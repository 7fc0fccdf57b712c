"""Search with recomputation: which strategies, and which values of the forward to compute again, at once.

Recomputation only adds time: a choice of strategies costs the same with it and without it, but for the calls and
reshards that run twice. So a choice of strategies that is optimal where memory is no object, and that fits as it is, is
optimal with recomputation too; only where it does not fit is the larger problem built (`solve_jointly`). That a choice
be optimal among those that fit would not be enough: one of cheaper strategies may fit with recomputation.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.errors import DoesNotFitError
from autoshard.ir.recompute import RecomputedNode
from passes.assignment import Solution
from passes.build_assignment import PlanningProblem, build_problem
from passes.dual_search import DualSearch
from passes.enumerate_strategies import Link, SearchSpace, leaves_program, operands_of, resolve
from passes.recompute import InsertRecompute, original_of
from passes.recompute_options import find_options
from passes.recompute_problem import build_recompute_problem
from passes.search import Search, restrict


@dataclass(frozen=True, slots=True)
class JointSolution:
    """A choice of strategies (its cost is with recomputation), what is recomputed, and of how many nodes that is.

    `planning` is the problem of the program that recomputes it; its variables are those of the one without.
    """

    planning: PlanningProblem
    solution: Solution
    nodes: tuple[RecomputedNode, ...] = ()
    candidates: int = 0


def solve_jointly(
    planning: PlanningProblem,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    start: Sequence[Solution],
) -> JointSolution:
    """A cheapest choice of strategies and of what to recompute that fits; see the module's docstring.

    Args:
        planning: the problem without recomputation.
        search: with the memory limit.
        allowed: variable to a mask of its options; absent variables are free.
        start: solutions without recomputation that fit, than which the result is not worse.

    Raises:
        DoesNotFitError: no choice fits, recompute what one may.
    """
    deadline = time.monotonic() + search.time_budget_s
    free = dataclasses.replace(search, memory_limit_bytes=None)(planning, allowed, start)
    if search.memory_limit_bytes is None or planning.usage(free.choice).max() <= search.memory_limit_bytes:
        return JointSolution(planning, free)

    def without() -> JointSolution:
        """The cheapest choice that fits as it is."""
        return JointSolution(planning, _by(deadline, search)(planning, allowed, start))

    if search.control.is_stopped:
        found = without().solution
        bound = min(found.cost, free.lower_bound)  # that of the search without recomputation holds for no other
        return JointSolution(planning, dataclasses.replace(found, lower_bound=bound))
    options = find_options(planning.space, planning.classes)
    if not options.keepings:
        return without()
    problem = build_recompute_problem(planning, options)
    start = [*start, *_without(planning, _by(deadline, search), allowed, start)]

    def attempt(limit: float) -> tuple[JointSolution, float]:
        """The cheapest choice that fits in a limit by the problem's count, and what its program takes."""
        within = dataclasses.replace(_by(deadline, search), memory_limit_bytes=limit)
        found = within(problem, problem.widen(allowed), start)
        nodes, choice = problem.recomputed(found.choice), problem.without_keepings(found.choice)
        running = with_recompute(planning, nodes)
        solution = Solution(choice, found.cost, found.lower_bound)
        return JointSolution(running, solution, nodes, len(options.anchors)), float(running.usage(choice).max())

    limit, bound, over, least = search.memory_limit_bytes, None, 0.0, np.inf
    try:
        for _ in range(_TIGHTENINGS):
            found, peak = attempt(limit - over)
            bound = found.solution.lower_bound if bound is None else bound
            if peak <= limit:
                return dataclasses.replace(found, solution=dataclasses.replace(found.solution, lower_bound=bound))
            over, least = over + peak - limit, min(least, peak)
        return without()
    except DoesNotFitError as error:
        if bound is None and error.smallest_bytes > limit:
            least = max(error.smallest_bytes, attempt(error.smallest_bytes)[1])
        elif not start:
            least = min(least, error.smallest_bytes or np.inf)
        else:
            return without()
        raise search.does_not_fit(planning, least) from error


_TIGHTENINGS = 5
"""Searches until one fits. The problem counts what is recomputed before it is clear where its clones stand, and may be
some bytes short; the search is then repeated with as many bytes less to spend."""


def _by(deadline: float, search: Search) -> Search:
    """The search within what is left of the time."""
    return dataclasses.replace(search, time_budget_s=max(1.0, deadline - time.monotonic()))


_ROUNDS = 12
"""Rounds of the search for a solution without recomputation to start from."""


def _without(
    planning: PlanningProblem, search: Search, allowed: Mapping[int, np.ndarray], start: Sequence[Solution]
) -> list[Solution]:
    """A good solution without recomputation, if one that fits is soon found: what to start from."""
    assert search.memory_limit_bytes is not None, "without a limit nothing is recomputed"
    problem = restrict(planning.assignment, allowed)
    problem = dataclasses.replace(problem, limit=float(search.memory_limit_bytes))
    quick = DualSearch(search.tolerance, _ROUNDS, search.time_budget_s, control=search.control)
    found = quick(problem, planning.usage, planning.memory_row, [solution.choice for solution in start])
    return [] if found is None else [found]


def with_recompute(planning: PlanningProblem, nodes: tuple[RecomputedNode, ...]) -> PlanningProblem:
    """The problem of the program in which `nodes` are recomputed; its variables and options are those of `planning`.

    What is recomputed has the variable of its original, so a choice of `planning` is one of the result.
    """
    if not nodes:
        return planning
    space, originals = _space_with(planning.space, nodes)
    representatives = {name: planning.members[planning.classes[original]][0] for name, original in originals.items()}
    return build_problem(space, planning.prices, planning.liveness.of(space), representatives)


def _space_with(space: SearchSpace, nodes: tuple[RecomputedNode, ...]) -> tuple[SearchSpace, dict[str, str]]:
    """The search space with clones, which have the strategies of their originals; and the original of each site."""
    program = InsertRecompute(nodes)(space.program)
    incoming: dict[str, list[Link]] = defaultdict(list)
    for link in space.links:
        if not leaves_program(space.sites[link.head], link):
            incoming[link.head].append(link)
    sites, links, originals = {}, [], {}
    for node in program.graph.nodes:
        original = original_of(node) or node.name
        if original in space.sites:
            originals[node.name] = original
            sites[node.name] = dataclasses.replace(
                space.sites[original], name=node.name, node=node, phase=node.meta["phase"]
            )
            for link in incoming[original]:
                tail, _ = resolve(operands_of(node)[link.operand])
                links.append(dataclasses.replace(link, tail=tail.name, head=node.name))
    for name, site in space.sites.items():
        if site.node is None:
            sites[name], originals[name] = site, name
    links += [link for link in space.links if leaves_program(space.sites[link.head], link)]
    return dataclasses.replace(space, program=program, sites=sites, links=tuple(links)), originals
