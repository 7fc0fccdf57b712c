r"""Price calls as parts of the kernels that run in place of them, so that a search minimises the time of what will run.

Which kernels a program has is found on one device (`pipeline.kernels_on_one_device`); each stands for calls, its
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
calls also where it is parted; else, parted, it is an estimate. What kernels save at collectives, where copies go with
what computes around them, it does not count.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autoshard.ir.kernels import Kernels, KernelUse
from autoshard.kernels.offload import TRANSFERS
from autoshard.rules.enumeration import Strategy
from autoshard.rules.hub import hub
from cost_models.compute import memory_time
from passes.memory.memory_tables import differs
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
class Part:
    """The terms of a kernel's time that belong to one member.

    Args:
        reads: operands by which it is the first to read a value, or a slice of one, each with the bytes of that over
            the operand's: a view may repeat what it views.
        writes: results that the kernel writes.
        launches: of the kernel, if it is the last member.
        beside_s: what the kernel does beside on one device, if it is the last member.
        is_product: whether it is a product of matrices, which costs what it does by itself.
    """

    reads: tuple[tuple[int, float], ...]
    writes: tuple[int, ...]
    launches: int = 0
    beside_s: float = 0.0
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
    """

    launches: int
    writes: float
    reads: bool
    has_tail: bool
    has_head: bool
    ends: bool


@dataclass(frozen=True, slots=True)
class Fusion:
    """The members of kernels and the links within kernels."""

    parts: Mapping[str, Part] = field(default_factory=dict)
    seams: Mapping[_LinkKey, Seam] = field(default_factory=dict)

    def seam(self, link: Link) -> Seam | None:
        """The seam at a link; None where it is in no kernel."""
        return self.seams.get(_key(link))

    def of_copies(self, space: SearchSpace, originals: Mapping[str, str]) -> Fusion:
        """The same for a program some of whose sites are copies of those of another, which have kernels alike."""
        copied = {name: self.parts[original] for name, original in originals.items() if original in self.parts}
        seams = {}
        for link in space.links:
            tail, head = originals.get(link.tail, link.tail), originals.get(link.head, link.head)
            seam = self.seams.get((tail, link.result, head, link.operand))
            if seam is not None:
                seams[_key(link)] = seam
        return Fusion({name: part for name, part in copied.items() if not _is_transfer(space.sites[name])}, seams)


NOTHING_FUSED = Fusion()
"""Every call runs by itself."""


def find_fusion(space: SearchSpace, kernels: Kernels, prices: Prices) -> Fusion:
    """The parts and seams of a program's kernels on one device."""
    return _Finding(space, prices, _owners(space, kernels)).run() if kernels.uses else NOTHING_FUSED


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
class _Finding:
    """The search for parts and seams.

    Args:
        owners: member to its kernel.
        incoming: site to the links of its operands.
        reads: member to what its part reads.
        written: values that go through memory.
    """

    space: SearchSpace
    prices: Prices
    owners: Mapping[str, KernelUse]
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
        return Fusion(parts, self._seams(paths, parts))

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

    def _parts(self) -> dict[str, Part]:
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
                parts[last] = replace(parts[last], beside_s=use.time_s - known)
        return parts

    def _time_on_one_device(self, name: str, part: Part) -> float:
        site = self.space.sites[name]
        return float(part_times(site, part, site.strategies[:1], self.prices)[0])

    def _part(self, name: str) -> Part:
        site = self.space.sites[name]
        writes = tuple(result for result in range(len(site.results)) if (name, result) in self.written)
        return Part(tuple(self.reads[name]), writes, is_product=self.prices.has_products(site))

    def _seams(self, paths: Sequence[Sequence[Link]], parts: Mapping[str, Part]) -> dict[_LinkKey, Seam]:
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

    def _seam(self, key: _LinkKey, first: Link, share: float, joins: bool, parts: Mapping[str, Part]) -> Seam:
        tail, _, head, _ = key
        by_itself = head in parts and parts[head].is_product
        is_held = (first.tail, first.result) in self.written or parts[first.tail].is_product
        return Seam(
            launches=int(joins and not by_itself),
            writes=0.0 if is_held else share,
            reads=not by_itself,
            has_tail=tail in parts,
            has_head=head in parts,
            ends=head in parts and parts[head].launches > 0,
        )


def part_times(site: Site, part: Part, strategies: Sequence[Strategy], prices: Prices) -> Floats:
    """Seconds of a member as part of its kernel, where it runs as it is; else of its call, [strategies]."""
    alone = prices.call_times(site, strategies)
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
    if part.beside_s:
        left = local_bytes_of(site.results[0], outputs[0], prices.mesh) / max(1, _bytes(site.results[0]))
        total += part.beside_s * left
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
    opens = differs(sources, targets, prices.mesh) | ~before[:, None] | ~after[None, :]
    return opens * (write[:, None] + (read + launch)[None, :])


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
