"""Search with recomputation and offload: strategies, and what of the forward to compute again or to fetch, at once.

Both only add time: a choice of strategies costs the same with them and without, but for calls and reshards that run
twice, and copies to and from the host. So a choice of strategies that is optimal where memory is no object, and that
fits as it is, is optimal with them too; only where it does not fit is the larger problem built (`solve_jointly`). That
a choice be optimal among those that fit would not be enough: one of cheaper strategies may fit with recomputation.

What fits is decided by the exact count of the program that will run (`fitting`).

With offload the problem is larger still, and contains that without. Where its solution may be far from the best, or
holds more in the host's memory than there is, the search is repeated without offload, and the cheaper of what fits is
taken.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from autoshard.errors import DoesNotFitError
from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import PartitionSpec
from autoshard.kernels.offload import to_host
from autoshard.rules.enumeration import Choice, Split, Strategy
from passes.planning.build_assignment import PlanningProblem, build_problem
from passes.planning.search import Search, restrict
from passes.recomputation.fitting import JointSolution, bounded, fitting
from passes.recomputation.recompute import InsertRecompute, moved_by, original_of
from passes.recomputation.recompute_options import OFFLOADED, RECOMPUTED, find_options
from passes.recomputation.recompute_problem import Again, build_recompute_problem
from passes.solver.assignment import Solution
from passes.solver.dual_search import DualSearch
from passes.strategies.enumerate_strategies import (
    Link,
    SearchSpace,
    Site,
    leaves_program,
    operands_of,
    resolve,
    rule_of,
    specs_of,
)
from passes.strategies.price import local_bytes


def solve_jointly(
    planning: PlanningProblem,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    start: Sequence[Solution],
    *,
    recompute: bool = True,
    offload: bool = True,
) -> JointSolution:
    """A cheapest choice of strategies and of what to recompute and offload that fits; see the module's docstring.

    Args:
        planning: the problem without recomputation.
        search: with the memory limit.
        allowed: variable to a mask of its options; absent variables are free.
        start: solutions without recomputation that fit, than which the result is not worse.
        recompute: whether values may be computed again; if not, nothing is offloaded either.
        offload: whether values may go to the host, if the device has a link to one.

    Raises:
        DoesNotFitError: no choice fits, recompute and offload what one may.
    """
    end = time.monotonic() + search.time_budget_s
    if not recompute:
        return _alone(planning, search, allowed, start, end)
    free = JointSolution(planning, dataclasses.replace(search, memory_limit_bytes=None)(planning, allowed, start))
    if search.memory_limit_bytes is None or free.peak_bytes() <= search.memory_limit_bytes:
        return free
    if search.control.is_stopped:
        # the bound of the search without recomputation holds for no other
        return bounded(_alone(planning, search, allowed, start, end), free.solution.lower_bound)
    if not offload or planning.prices.cluster.device.host_link is None:
        return _solve(planning, search, allowed, start, end, offload=False)
    most = end - _SHARE_WITHOUT * search.time_budget_s
    found = _solve(planning, search, allowed, start, most, offload=True)
    room = planning.prices.cluster.host_bytes_per_device
    has_room = room is None or found.host_bytes <= room
    is_near = found.solution.cost * (1 - _FAR) <= found.solution.lower_bound
    if has_room and (is_near or search.control.is_stopped):
        return found
    try:
        other = _solve(planning, search, allowed, start, end, offload=False)
    except DoesNotFitError:
        if has_room:
            return found
        raise
    if has_room and found.solution.cost <= other.solution.cost:
        return found
    return bounded(other, found.solution.lower_bound)


_SHARE_WITHOUT = 0.3
"""Part of the time in which the search is repeated without offload, where its gap with it is over `_FAR`."""

_FAR = 0.05
"""Gap up to which the search is not repeated: measured, where it was 2 to 5 %, repeating it gained nothing, and at 11 %
less than one in a thousand."""


def _solve(
    planning: PlanningProblem,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    start: Sequence[Solution],
    deadline: float,
    *,
    offload: bool,
) -> JointSolution:
    """See `solve_jointly`, where the cheapest choice of all does not fit; the host's memory has no limit."""
    assert search.memory_limit_bytes is not None, "without a limit nothing is recomputed"

    options = find_options(planning.space, planning.classes, offload=offload)
    if not options.keepings:
        return _alone(planning, search, allowed, start, deadline)
    problem = build_recompute_problem(planning, options)
    start = [*start, *_without(planning, _by(deadline, search), allowed, start)]

    def attempt(limit: float) -> JointSolution:
        """The cheapest choice that fits in a limit by the problem's count."""
        within = dataclasses.replace(_by(deadline, search), memory_limit_bytes=limit)
        found = within(problem, problem.widen(allowed), start)
        again, choice = problem.again(found.choice), problem.without_keepings(found.choice)
        running = with_again(planning, again)
        return JointSolution(
            running,
            Solution(choice, found.cost, found.lower_bound),
            again,
            options.candidates(RECOMPUTED),
            options.candidates(OFFLOADED),
            host_bytes(running, choice),
        )

    found, least = fitting(attempt, search.memory_limit_bytes)
    if found is not None:
        return found
    if start:
        return _alone(planning, search, allowed, start, deadline)
    raise search.does_not_fit(planning, least)


def _alone(
    planning: PlanningProblem,
    search: Search,
    allowed: Mapping[int, np.ndarray],
    start: Sequence[Solution],
    deadline: float,
) -> JointSolution:
    """The cheapest choice that fits as it is."""

    def attempt(limit: float) -> JointSolution:
        within = dataclasses.replace(_by(deadline, search), memory_limit_bytes=limit)
        return JointSolution(planning, within(planning, allowed, start))

    if search.memory_limit_bytes is None:
        return JointSolution(planning, search(planning, allowed, start))
    found, least = fitting(attempt, search.memory_limit_bytes)
    if found is None:
        raise search.does_not_fit(planning, least)
    return found


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


def with_again(planning: PlanningProblem, again: Again) -> PlanningProblem:
    """The problem of the program that recomputes and offloads; its variables and options are those of `planning`.

    What is recomputed, and copies to and from the host, have the variable of their original, so a choice of `planning`
    is one of the result.
    """
    if not again:
        return planning
    space, originals = _space_with(planning.space, again)
    representatives = {name: planning.members[planning.classes[original]][0] for name, original in originals.items()}
    fusion = planning.fusion.of_copies(space, originals)
    return build_problem(space, planning.prices, planning.liveness.of(space), representatives, fusion=fusion)


def host_bytes(planning: PlanningProblem, choice: Sequence[int]) -> float:
    """Bytes that the host holds for each rank at the end of the forward."""
    space = planning.space
    copies = [site for site in space.sites.values() if site.node is not None and site.node.target is to_host]
    specs = ((site, planning.strategy(site.name, choice).outputs[0]) for site in copies)
    return float(sum(local_bytes(site.results[0], spec, space.mesh) for site, spec in specs))


def _space_with(space: SearchSpace, again: Again) -> tuple[SearchSpace, dict[str, str]]:
    """The search space with clones and copies, which have the specs of their originals; and the original of each."""
    program = InsertRecompute(again.recomputed, again.offloaded)(space.program)
    incoming: dict[str, list[Link]] = defaultdict(list)
    for link in space.links:
        if not leaves_program(space.sites[link.head], link):
            incoming[link.head].append(link)
    transfers = _Transfers(space)
    sites, links, originals = {}, [], {}
    for node in program.graph.nodes:
        moved, original = moved_by(node), original_of(node) or node.name
        if moved is not None:
            owner, result = resolve(space.program.nodes[moved])
            originals[node.name] = owner.name
            sites[node.name] = transfers.site(node, space.sites[owner.name], result)
            tail, result = resolve(operands_of(node)[0])
            links.append(Link(tail.name, result, node.name, 0))
        elif original in space.sites:
            originals[node.name] = original
            sites[node.name] = dataclasses.replace(
                space.sites[original], name=node.name, node=node, phase=node.meta["phase"]
            )
            for link in incoming[original]:
                tail, result = resolve(operands_of(node)[link.operand])
                links.append(dataclasses.replace(link, tail=tail.name, result=result, head=node.name))
    for name, site in space.sites.items():
        if site.node is None:
            sites[name], originals[name] = site, name
    links += [link for link in space.links if leaves_program(space.sites[link.head], link)]
    return dataclasses.replace(space, program=program, sites=sites, links=tuple(links)), originals


@dataclass(slots=True)
class _Transfers:
    """Sites of copies to and from the host: each option leaves the value as an option of its owner has it."""

    space: SearchSpace
    strategies: dict[tuple[int, int], tuple[Strategy, ...]] = field(default_factory=dict)
    calls: dict[object, int] = field(default_factory=dict)

    def site(self, node: fx.Node, owner: Site, result: int) -> Site:
        key = (id(owner.strategies), result)
        if key not in self.strategies:
            self.strategies[key] = tuple(
                Strategy((spec,), (spec,), _choices(spec, self.space.mesh)) for spec in specs_of(owner, result)
            )
        value = owner.results[result]
        highest = max(site.call for site in self.space.sites.values())
        number = self.calls.setdefault((node.target, value, *key), highest + 1 + len(self.calls))
        return Site(node.name, node, node.meta["phase"], self.strategies[key], (value,), rule_of(node), number)


def _choices(spec: PartitionSpec, mesh: Mesh) -> tuple[Choice, ...]:
    """What each axis does for a copy of a value under a spec; see `autoshard.rules.offload`."""
    dims = (spec.dim_of(axis) for axis in mesh.axis_names)
    return tuple(None if dim is None else Split(f"d{dim}") for dim in dims)
