"""Make the planning problem of a program that recomputes and offloads values, which has more sites."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from autoshard.ir.mesh import Mesh
from autoshard.ir.recompute import PHASE
from autoshard.ir.spec import PartitionSpec
from autoshard.kernels.offload import to_host
from autoshard.rules.enumeration import Choice, Split, Strategy
from passes.memory.repeated_lifetimes import with_repeated
from passes.planning.build_assignment import PlanningProblem, build_problem
from passes.recomputation.recompute import InsertRecompute, moved_by, original_of
from passes.recomputation.recompute_problem import Restored
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
from passes.strategies.fold_blocks import module_paths
from passes.strategies.price import local_bytes
from passes.strategies.repeated import NotAlikeError, find_repeated, paths_where_run


def with_restored(planning: PlanningProblem, restored: Restored) -> PlanningProblem:
    """Return the planning problem of the program that restores values, with the variables and options of `planning`.

    Clones, and copies to and from the host, have the variables of their originals. So a choice of `planning` is a
    choice of the result.

    Raises:
        NotAlikeError: the program leaves out blocks, and the blocks beside them do not restore equal values at equal
            places.
    """
    if not restored:
        return planning
    space, originals = space_with(planning.space, restored)
    representatives = {name: planning.members[planning.classes[original]][0] for name, original in originals.items()}
    brought = [name for name, site in space.sites.items() if site.phase == PHASE]
    repeated = find_repeated(space, paths_where_run(space, module_paths(space.program), brought))
    if any(len({representatives[name] for name in alike.names}) > 1 for alike in repeated.sites):
        raise NotAlikeError("alike blocks restore values that do not share one choice")
    liveness = with_repeated(planning.liveness.of(space), repeated, space)
    return build_problem(space, planning.prices, liveness, representatives, repeated)


def host_bytes(planning: PlanningProblem, choice: Sequence[int]) -> float:
    """Return the bytes of offloaded values in the host's memory for each rank, at the end of a forward."""
    space = planning.space
    copies = [site for site in space.sites.values() if site.node is not None and site.node.target is to_host]
    specs, counts = ((site, planning.strategy(site.name, choice).outputs[0]) for site in copies), planning.counts()
    sizes = (counts.get(site.name, 1) * local_bytes(site.results[0], spec, space.mesh) for site, spec in specs)
    return float(sum(sizes))


def space_with(space: SearchSpace, restored: Restored) -> tuple[SearchSpace, dict[str, str]]:
    """Return the search space of the program that restores values, and the original of each of its sites, by name.

    Clones, and copies to and from the host, have the specs of their originals.
    """
    program = InsertRecompute(restored.recomputed, restored.offloaded)(space.program)
    incoming: dict[str, list[Link]] = defaultdict(list)
    for link in space.links:
        if not leaves_program(space.sites[link.head], link):
            incoming[link.head].append(link)
    transfers = _Transfers(space)
    sites, links, originals = {}, [], {}
    before = space.program.nodes_by_name()
    for node in program.graph.nodes:
        moved, original = moved_by(node), original_of(node) or node.name
        if moved is not None:
            owner, result = resolve(before[moved])
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
    """Makes the sites of copies to and from the host.

    Each option of such a site keeps the spec that the copied value has under one of its options.
    """

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
    """Return the choice of each mesh axis in the rule of a copy, as `autoshard.rules.pointwise` defines it.

    An axis chooses the dim that the spec splits over the axis, or None.
    """
    dims = (spec.dim_of(axis) for axis in mesh.axis_names)
    return tuple(None if dim is None else Split(f"d{dim}") for dim in dims)
