r"""Price calls as parts of the kernels that run in place of them, so that a search minimises the time of what will run.

Which kernels a program has is found on one device (`passes.driver.kernels_on_one_device`); each stands for calls, its
*members*. With sharded values a kernel :math:`K` is whole under a choice if every link between its members keeps the
spec of what it carries, and every member runs as it is, without communication or padding of its own. It then takes

.. math::  t_K = n_K \lambda + \sum_{r \in R_K} m(r) + \sum_{w \in W_K} m(w) + \Delta_K \, s ,

launches, what it reads, once each, what it writes (:math:`m`: seconds to move a value's local bytes), and what it does
beside: :math:`\Delta_K` is what remains of its time on one device, of which the share :math:`s` is left that the last
member's first result keeps on each rank. Each term belongs to one member: the first that reads `r`, the one that makes
`w`, the last. So

* a member costs its terms in place of its call's time (`part_times`); a product of matrices goes on costing what it
  does; under a strategy with which a member does not run as it is, it costs its call's time;
* a link between members whose spec changes, or at an end of which a call does not run as it is, is a *seam that opens*:
  it costs the launch of one kernel more, the write of the value, unless others have it written anyway, and its read
  (`seam_table`). Where several paths join the same members, the launch is counted on as few as join them; where a hub
  parts a value among readers, each has its part of the write.

Costs so join two variables at most, on links that the problem has anyway: the solver's reductions and bounds hold. The
objective is exact where kernels are whole, if ranks have the kernels of one device, and of a kernel that is a chain of
calls also where it is parted; else, parted, it is an estimate. What kernels save of copies at collectives belongs to
the link (`copy_prices`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autoshard.ir.kernels import Kernels, KernelUse
from autoshard.kernels.offload import TRANSFERS
from autoshard.rules.enumeration import Strategy
from autoshard.rules.hub import hub
from cost_models.compute import memory_time
from passes.memory.memory_tables import differs
from passes.planning.copy_prices import Taken, saved_table
from passes.planning.rewrite_prices import PriceWithin, saved_within
from passes.preparation.canonicalize import is_view
from passes.solver.assignment import Floats
from passes.strategies.enumerate_strategies import (
    Link,
    SearchSpace,
    Site,
    ValueInfo,
    leaves_program,
    needs_of,
    specs_of,
)
from passes.strategies.price import Prices, local_bytes_of

_LinkKey = tuple[str, int, str, int]

_ROUNDING = 1e-9
"""Part of a kernel's time up to which its terms are taken to sum to it."""


@dataclass(frozen=True, slots=True)
class SideTime:
    """Seconds on one device of what a kernel does beside, and for which result of a member: it is as long as that."""

    seconds: float
    result: int


@dataclass(frozen=True, slots=True)
class MemberTerms:
    """The terms of a kernel's time that belong to one member.

    Args:
        reads: operands by which it is the first to read a value, or a slice of one, each with the bytes of that over
            the operand's: a view may repeat what it views.
        writes: results that the kernel writes.
        launches: of the kernel, if it is the last member.
        beside: what the kernel does beside, if it is for a result of this member.
        is_product: whether it is a product of matrices, which costs what it does by itself.
    """

    reads: tuple[tuple[int, float], ...]
    writes: tuple[int, ...]
    launches: int = 0
    beside: SideTime | None = None
    is_product: bool = False


@dataclass(frozen=True, slots=True)
class Seam:
    """What it costs where a kernel is parted at a link.

    Args:
        launches: kernels more: of the links that join the members of a kernel, on a tree; none at the others.
        writes: what of the value is then written that else is not: its part of all, where readers part the value.
        reads: whether it is then read.
        has_tail, has_head: whether the ends are members, rather than views and hubs between members.
        ends: whether the head is the last member.
        lost_before, lost_behind: what the kernel does beside, for a result of the tail or the head, and does not where
            it is parted: of kernels of two members.
    """

    launches: int
    writes: float
    reads: bool
    has_tail: bool
    has_head: bool
    ends: bool
    lost_before: SideTime | None = None
    lost_behind: SideTime | None = None


@dataclass(frozen=True, slots=True)
class Fusion:
    """What kernels do to prices.

    Args:
        parts: the members of kernels.
        seams: the links within kernels.
        copies: the links whose copies kernels may take.
        within: seconds that kernels save within the local form of a call, for each strategy.
    """

    parts: Mapping[str, MemberTerms] = field(default_factory=dict)
    seams: Mapping[_LinkKey, Seam] = field(default_factory=dict)
    copies: Mapping[_LinkKey, Taken] = field(default_factory=dict)
    within: Mapping[str, Floats] = field(default_factory=dict)

    def at(self, link: Link) -> tuple[Seam | None, Taken | None]:
        """The seam at a link, None where it is in no kernel; and which copies kernels may take, None for none."""
        return self.seams.get(_key(link)), self.copies.get(_key(link))

    def of_copies(self, space: SearchSpace, originals: Mapping[str, str]) -> Fusion:
        """The same for a program some of whose sites are copies of those of another, which have kernels alike."""
        copied = {name: self.parts[original] for name, original in originals.items() if original in self.parts}
        seams, copies = {}, {}
        for link in space.links:
            tail, head = originals.get(link.tail, link.tail), originals.get(link.head, link.head)
            key = (tail, link.result, head, link.operand)
            if key in self.seams:
                seams[_key(link)] = self.seams[key]
            if key in self.copies:
                copies[_key(link)] = self.copies[key]
        parts = {name: part for name, part in copied.items() if not _is_transfer(space.sites[name])}
        within = {name: self.within[original] for name, original in originals.items() if original in self.within}
        return Fusion(parts, seams, copies, within)


NOTHING_FUSED = Fusion()
"""Every call runs by itself."""


def find_fusion(
    space: SearchSpace, prices: Prices, kernels: Kernels, takers: Collection[str], price_within: PriceWithin
) -> Fusion:
    """What kernels do to a program's prices.

    Args:
        space: the sites and links.
        prices: the prices without kernels.
        kernels: the program's kernels on one device.
        takers: calls that may be in kernels with copies.
        price_within: what kernels do of the local form of a call.
    """
    fusion = _SeamSearch(space, prices, _owners(space, kernels), takers).run()
    return replace(fusion, within=saved_within(space, prices, price_within))


def _owners(space: SearchSpace, kernels: Kernels) -> dict[str, KernelUse]:
    """The kernel of each member; of kernels that stand for several whole calls."""
    return {
        name: use
        for use in kernels.uses
        if len(use.stands_for) > 1
        and all(share == 1.0 and name in space.sites for name, share in use.stands_for.items())
        for name in use.stands_for
    }


@dataclass(frozen=True, slots=True)
class _Slice:
    """What a member reads of a value: bytes of it, and bytes of the operand by which it does, which may repeat it."""

    member: str
    operand: int
    size: int
    operand_size: int


@dataclass(slots=True)
class _SeamSearch:
    """The search for parts and seams.

    Args:
        owners: member to its kernel.
        takers: pointwise calls that a generated kernel may compute.
        incoming: site to the links of its operands.
        reads: member to what its part reads.
        written: values that go through memory.
    """

    space: SearchSpace
    prices: Prices
    owners: Mapping[str, KernelUse]
    takers: Collection[str]
    incoming: dict[str, list[Link]] = field(default_factory=lambda: defaultdict(list))
    reads: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    written: set[tuple[str, int]] = field(default_factory=set)

    def run(self) -> Fusion:
        for link in self.space.links:
            if not leaves_program(self.space.sites[link.head], link):
                self.incoming[link.head].append(link)
        memory = {id(use): {self._base_of(name) for name in use.reads} for use in self.owners.values()}
        paths: list[list[Link]] = []
        for link in self.space.links:
            leaves = leaves_program(self.space.sites[link.head], link)
            if not leaves and _is_free(self.space.sites[link.head]):
                continue
            path, reader = self._path(link), self.owners.get(link.head)
            if leaves or reader is None or path[0].tail in memory[id(reader)]:
                self.written.add((path[0].tail, path[0].result))
            elif path[0].tail in self.owners:
                paths.append(path)
        self._find_reads(memory)
        parts = self._parts()
        return Fusion(parts, self._seams(paths, parts), self._copies())

    def _copies(self) -> dict[_LinkKey, Taken]:
        """Which copies of each link's reshard may go with kernels, where any may."""
        outgoing: dict[tuple[str, int], list[Link]] = defaultdict(list)
        for link in self.space.links:
            outgoing[link.tail, link.result].append(link)

        def readers(link: Link) -> list[str]:
            """The calls that read a link's value, by way of views and hubs; a result of the program reads it too."""
            head = self.space.sites[link.head]
            if leaves_program(head, link) or not _is_free(head):
                return [link.head]
            return [
                name
                for result in range(len(head.results))
                for item in outgoing[link.head, result]
                for name in readers(item)
            ]

        found: dict[_LinkKey, Taken] = {}
        for link in self.space.links:
            path = self._path(link)
            behind = readers(link)
            kernels = {id(self.owners[name]) if name in self.owners else name for name in behind}
            taken = Taken(
                before=path[0].tail in self.takers,
                behind=not leaves_program(self.space.sites[link.head], link)
                and any(name in self.takers for name in behind),
                is_read_beside=any(len(outgoing[item.tail, item.result]) > 1 for item in path),
                is_read_often=len(kernels) > 1,
            )
            if taken.before or taken.behind:
                found[_key(link)] = taken
        return found

    def _path(self, link: Link) -> list[Link]:
        """The links from the call (or input) that makes a value, by way of views and hubs, to a reader."""
        path = [link]
        while _is_free(self.space.sites[path[0].tail]):
            path.insert(0, self.incoming[path[0].tail][0])
        return path

    def _base_of(self, name: str) -> str:
        """What makes the value that a site names."""
        while _is_free(self.space.sites[name]):
            name = self.incoming[name][0].tail
        return name

    def _find_reads(self, memory: Mapping[int, set[str]]) -> None:
        """The operands by which members read what their kernels read: slices of a value, each once, or all of it."""
        slices: dict[tuple[int, str, int], dict[tuple[str, int], _Slice]] = defaultdict(dict)
        for name in self.space.sites:
            for link in self.incoming[name] if name in self.owners else ():
                path, kernel = self._path(link), id(self.owners[name])
                if path[0].tail in memory[kernel]:
                    sizes = [_bytes(self.space.sites[item.tail].results[item.result]) for item in path]
                    narrowest = path[sizes.index(min(sizes))]
                    found = _Slice(name, link.operand, min(sizes), sizes[-1])
                    known = slices[kernel, path[0].tail, path[0].result]
                    known.setdefault((narrowest.tail, narrowest.result), found)
        for (_, tail, result), known in slices.items():
            whole, parts = _bytes(self.space.sites[tail].results[result]), list(known.values())
            if sum(part.size for part in parts) >= whole:
                parts = [replace(parts[0], size=whole)]
            for part in parts:
                self.reads[part.member].append((part.operand, part.size / max(1, part.operand_size)))

    def _parts(self) -> dict[str, MemberTerms]:
        parts = {name: self._part(name) for name in self.space.sites if name in self.owners}
        members: dict[int, list[str]] = defaultdict(list)
        for name in parts:
            members[id(self.owners[name])].append(name)
        for names in members.values():
            use, last = self.owners[names[0]], names[-1]
            products = sum(parts[name].is_product for name in names)
            parts[last] = replace(parts[last], launches=max(0, use.launches - products))
            known = sum(self._time_on_one_device(name, parts[name]) for name in names)
            if abs(use.time_s - known) > _ROUNDING * use.time_s:
                owner, result = self._least_written(names, parts)
                parts[owner] = replace(parts[owner], beside=SideTime(use.time_s - known, result))
        return parts

    def _least_written(self, names: Sequence[str], parts: Mapping[str, MemberTerms]) -> tuple[str, int]:
        """The smallest result of a kernel, for which it does what it does beside: sums of parts, mostly."""
        written = [(name, result) for name in names for result in parts[name].writes] or [(names[-1], 0)]
        return min(written, key=lambda item: _bytes(self.space.sites[item[0]].results[item[1]]))

    def _time_on_one_device(self, name: str, part: MemberTerms) -> float:
        site = self.space.sites[name]
        return float(part_times(site, part, site.strategies[:1], self.prices)[0])

    def _part(self, name: str) -> MemberTerms:
        site = self.space.sites[name]
        writes = tuple(result for result in range(len(site.results)) if (name, result) in self.written)
        return MemberTerms(tuple(self.reads[name]), writes, is_product=self.prices.has_products(site))

    def _seams(self, paths: Sequence[Sequence[Link]], parts: Mapping[str, MemberTerms]) -> dict[_LinkKey, Seam]:
        """The seams of the links on paths between members."""
        firsts = {_key(link): path[0] for path in paths for link in path}
        branches = Counter(key[:2] for key in firsts)
        shares: dict[_LinkKey, float] = {}
        for path in paths:
            share = 1.0
            for link in path:
                share /= branches[_key(link)[:2]]
                shares[_key(link)] = share
        joins = self._joining(paths)
        return {key: self._seam(key, first, shares[key], key in joins, parts) for key, first in firsts.items()}

    def _joining(self, paths: Sequence[Sequence[Link]]) -> set[_LinkKey]:
        """The links on as few paths as join the members of each kernel."""
        joined: dict[str, str] = {}

        def root(name: str) -> str:
            while name in joined:
                name = joined[name]
            return name

        found: set[_LinkKey] = set()
        for path in paths:
            tail, head = path[0].tail, path[-1].head
            if self.owners[tail] is self.owners[head] and root(tail) != root(head):
                joined[root(tail)] = root(head)
                found |= set(map(_key, path))
        return found

    def _seam(self, key: _LinkKey, first: Link, share: float, joins: bool, parts: Mapping[str, MemberTerms]) -> Seam:
        tail, _, head, _ = key
        by_itself = head in parts and parts[head].is_product
        is_held = (first.tail, first.result) in self.written or parts[first.tail].is_product
        is_pair = tail in parts and head in parts and set(self.owners[tail].stands_for) == {tail, head}
        return Seam(
            launches=int(joins and not by_itself),
            writes=0.0 if is_held else share,
            reads=not by_itself,
            has_tail=tail in parts,
            has_head=head in parts,
            ends=head in parts and parts[head].launches > 0,
            lost_before=parts[tail].beside if is_pair else None,
            lost_behind=parts[head].beside if is_pair else None,
        )


def part_times(
    site: Site, part: MemberTerms, strategies: Sequence[Strategy], prices: Prices, within: Floats | None = None
) -> Floats:
    """Seconds of a member as part of its kernel, where it runs as it is; else of its call, [strategies].

    `within`: what kernels save within its call.
    """
    alone = prices.call_times(site, strategies) - (0.0 if within is None else within)
    total = alone.copy() if part.is_product else np.zeros(len(strategies))
    outputs = [tuple(strategy.outputs[result] for strategy in strategies) for result in range(len(site.results))]
    if not part.is_product:
        operands = prices.operand_values(site)
        for operand, ratio in part.reads:
            inputs = tuple(strategy.inputs[operand] for strategy in strategies)
            total += _moved(ratio * local_bytes_of(operands[operand], inputs, prices.mesh), prices)
        for result in part.writes:
            total += _moved(local_bytes_of(site.results[result], outputs[result], prices.mesh), prices)
    total += part.launches * prices.cluster.device.launch_latency_s
    total += _beside_times(site, part.beside, strategies, prices)
    return np.where(_runs_as_it_is(site, strategies, prices), np.maximum(total, 0.0), alone)


def seam_table(tail: Site, head: Site, link: Link, seam: Seam, prices: Prices) -> Floats:
    """Seconds that it costs where a kernel is parted at a link, [strategies of the tail, of the head]; else 0."""
    sources, targets = specs_of(tail, link.result), needs_of(head, link)
    value = tail.results[link.result]
    every = np.ones(len(sources), dtype=bool), np.ones(len(targets), dtype=bool)
    before = _runs_as_it_is(tail, tail.strategies, prices) if seam.has_tail else every[0]
    after = _runs_as_it_is(head, head.strategies, prices) if seam.has_head else every[1]
    write = _moved(local_bytes_of(value, sources, prices.mesh), prices) * before * seam.writes
    read = _moved(local_bytes_of(value, targets, prices.mesh), prices) * after * seam.reads
    launch = seam.launches * prices.cluster.device.launch_latency_s * (every[1] if seam.ends else after)
    lost_before = _beside_times(tail, seam.lost_before, tail.strategies, prices) * before
    lost_behind = _beside_times(head, seam.lost_behind, head.strategies, prices) * after
    opens = differs(sources, targets, prices.mesh) | ~before[:, None] | ~after[None, :]
    return opens * ((write - lost_before)[:, None] + (read + launch - lost_behind)[None, :])


def copies_table(tail: Site, head: Site, link: Link, taken: Taken, times: Floats, prices: Prices) -> Floats:
    """Seconds of copies that go with kernels, [strategies of the tail, of the head]; `times`: those of the reshards."""
    sources, targets = specs_of(tail, link.result), needs_of(head, link)
    before, behind = saved_table(tail.results[link.result], sources, targets, times, taken, prices)
    return before * _may_fuse(tail, prices)[:, None] + behind * _may_fuse(head, prices)[None, :]


def _may_fuse(site: Site, prices: Prices) -> Any:
    """Under which strategies a call, or who makes or reads a value that a site names, may be in a kernel."""
    is_call = site.node is not None and site.node.op == "call_function"
    return _runs_as_it_is(site, site.strategies, prices) if is_call else np.ones(len(site.strategies), dtype=bool)


def _beside_times(site: Site, beside: SideTime | None, strategies: Sequence[Strategy], prices: Prices) -> Floats:
    """Seconds of what a kernel does beside, [strategies]."""
    if beside is None:
        return np.zeros(len(strategies))
    value, outputs = site.results[beside.result], tuple(item.outputs[beside.result] for item in strategies)
    return beside.seconds * local_bytes_of(value, outputs, prices.mesh) / max(1, _bytes(value))


def _runs_as_it_is(site: Site, strategies: Iterable[Strategy], prices: Prices) -> Any:
    return np.array([prices.runs_as_it_is(site, strategy) for strategy in strategies], dtype=bool)


def _moved(sizes: Floats, prices: Prices) -> Floats:
    """Seconds to read or write values of so many bytes."""
    return np.array([memory_time(size, prices.cluster.device) if size else 0.0 for size in sizes.tolist()])


def _key(link: Link) -> _LinkKey:
    return link.tail, link.result, link.head, link.operand


def _is_free(site: Site) -> bool:
    """Whether a site names a value that is there: a view, or a hub."""
    node = site.node
    return node is not None and node.op == "call_function" and (node.target is hub or is_view(node))


def _is_transfer(site: Site) -> bool:
    return site.node is not None and site.node.target in TRANSFERS


def _bytes(value: ValueInfo) -> int:
    return math.prod(value.shape) * value.itemsize
