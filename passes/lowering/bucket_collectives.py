"""Joins the collectives of many gradients or many parameters in buckets, with one collective for each bucket.

Before → after: `wait(all_reduce(a))`, `wait(all_reduce(b))` → `flat = wait(all_reduce(cat([a, b])))`, and both results
are views of `flat`. In a reduce-scatter each member has one row for each rank, so members are joined by `cat([a, b],
1)`. In an all-gather the result has one row for each rank, and each member is copied out of all rows.

A bucket's collective stands at the start of its last member, and its wait at the first member's wait. So collectives
share a bucket only if none of their results is read before the last of them starts. `WaitLate` arranges this for
gradients and for updated parameters. The members' order in the bucket is the order of the phase's results.

`passes.verification.expand_collectives` inverts the rewrite for verification.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import fx

from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT, is_collective, is_wait
from autoshard.ir.communicators import group_axes
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from passes.lowering.rewrite_phases import rewrite_phases
from passes.strategies.local_tracer import TIMES_AS_LARGE, LocalTracer
from passes.strategies.local_units import LocalUnits

_aten = torch.ops.aten
MIB = 2**20


@dataclass(frozen=True, slots=True)
class BucketCollectives:
    """Puts the collectives of each phase into buckets.

    A kind is all collectives of a phase with equal `_BucketMember.key`. Only collectives of one kind share buckets. The
    size of a bucket is the bytes of one rank's piece, which one step of a ring sends. So buckets of one size have the
    same share of latency on any number of ranks.

    Let `largest` be an eighth of all bytes of the kind, within `least_bytes` and `most_bytes`. Then there are so few
    buckets that their latency is negligible. A bucket of several members does not exceed `largest`. It is also at most
    as large as all earlier buckets together, so that the first buckets start soon. It is at most half of the remaining
    bytes, so that little is under way when computation ends. The last two limits do not apply below `end_bytes`.

    Args:
        end_bytes: a bucket may always have this size, but at most a quarter of `largest`. None: a bucket may always
            have the size `largest`.
        least_bytes, most_bytes: least and greatest value of `largest`.
    """

    end_bytes: int | None = MIB // 2
    least_bytes: int = MIB // 2
    most_bytes: int = 8 * MIB

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        mesh, units = phased.lowered.mesh, LocalUnits.of(phased.lowered)
        return rewrite_phases(phased, lambda graph_module: self._rewrite(graph_module, mesh, units))

    def _rewrite(self, graph_module: fx.GraphModule, mesh: Mesh, units: LocalUnits) -> fx.GraphModule:
        buckets = [bucket for bucket in self._buckets(graph_module.graph, mesh, units) if bucket.is_written]
        return _rewritten(graph_module, buckets) if buckets else graph_module

    def _buckets(self, graph: fx.Graph, mesh: Mesh, units: LocalUnits) -> Iterator[_Bucket]:
        by_key: defaultdict[tuple[Any, ...], list[_BucketMember]] = defaultdict(list)
        for member in _members(graph, mesh, units):
            by_key[member.key].append(member)
        for members in by_key.values():
            total_bytes = sum(member.count * member.size for member in members)
            yield from self._fill(members, self.largest_bytes(total_bytes))

    def largest_bytes(self, total_bytes: int) -> int:
        """Return the size of the largest bucket, given the total size of the collectives that may share buckets.

        Both sizes are bytes of one rank's piece.
        """
        return min(self.most_bytes, max(self.least_bytes, total_bytes // 8))

    def _fill(self, members: Sequence[_BucketMember], most_bytes: int) -> Iterator[_Bucket]:
        end_bytes = most_bytes if self.end_bytes is None else min(self.end_bytes, most_bytes // 4)
        before, total = 0, sum(member.count * member.size for member in members)
        bucket, held, cap = list[_BucketMember](), 0, 0
        for _, group in groupby(members, lambda member: member.count):
            alike = list(group)
            for part in [alike] if alike[0].count > 1 else [[member] for member in alike]:
                size = sum(member.count * member.size for member in part)
                if bucket and (any(_is_too_late(bucket, member) for member in part) or held + size > cap):
                    yield _Bucket.of_all(bucket)
                    bucket = []
                if not bucket:
                    cap, held = max(end_bytes, min(most_bytes, before, (total - before) // 2)), 0
                before += size
                joins = part[0].count == 1 or _next_starts_in_time(part, members)
                if part[0].count > 1 and (size > cap or not joins):
                    yield from _even_buckets(part, most_bytes, joins)
                else:
                    bucket += part
                    held += size
        if bucket:
            yield _Bucket.of_all(bucket)


def _even_buckets(members: Sequence[_BucketMember], most_bytes: int, joins: bool) -> Iterator[_Bucket]:
    """Cut the collectives of a repeated unit into about equal buckets, and yield the buckets.

    Their number is the total bytes divided by `most_bytes`, rounded up. `joins` says whether a bucket of the whole
    program may also have collectives of the next units.
    """
    total = sum(member.size for member in members)
    ends = list(accumulate(member.size for member in members))
    count = max(1, math.ceil(total / most_bytes))
    whole_bytes = min(most_bytes, members[0].count * total) if joins else 0
    bucket: list[_BucketMember] = []
    number = 0
    for member, end in zip(members, ends, strict=True):
        place = int(count * (end - member.size / 2) / total) if total else 0
        if bucket and (place != number or _is_too_late(bucket, member)):
            yield _Bucket(tuple(bucket), whole_bytes)
            bucket = []
        bucket.append(member)
        number = place
    yield _Bucket(tuple(bucket), whole_bytes)


def _is_too_late(bucket: Sequence[_BucketMember], member: _BucketMember) -> bool:
    """Whether `member` starts after the wait for a member of the bucket, so that it cannot join the bucket."""
    return any(other.waited_at < member.started_at for other in bucket)


def _next_starts_in_time(unit: Sequence[_BucketMember], members: Sequence[_BucketMember]) -> bool:
    """Whether buckets may join collectives of the repeated unit `unit` with collectives of the next unit.

    This is so if the first collective in `members` after the unit starts before the unit's first wait.
    """
    place = members.index(unit[-1]) + 1
    return place < len(members) and not _is_too_late(unit, members[place])


@dataclass(frozen=True, slots=True)
class _BucketMember:
    """A collective that may go into a bucket.

    Args:
        start, wait: the nodes of the collective, and of the wait for it.
        started_at, waited_at: the indices of both nodes in the graph.
        ranks: number of ranks in the process group.
        count: how many equal collectives of the whole program this collective stands for, itself included.
    """

    start: fx.Node
    wait: fx.Node
    started_at: int
    waited_at: int
    ranks: int
    count: int = 1

    @property
    def operand(self) -> fx.Node:
        """The value that each rank passes to the collective."""
        (operand,) = self.start.all_input_nodes
        return operand

    @property
    def shape(self) -> list[int]:
        return list(self.start.meta["val"].shape)

    @property
    def size(self) -> int:
        """Bytes of one rank's piece.

        For an all-gather this is the operand. For a reduction it is the operand divided by `ranks`.
        """
        value = self.operand.meta["val"]
        return value.numel() * value.element_size() // (1 if self.start.target is ALL_GATHER else self.ranks)

    @property
    def key(self) -> tuple[Any, ...]:
        """The operator, process group, reduction, dtype and device. Only collectives with equal keys share a bucket."""
        value = self.operand.meta["val"]
        return (self.start.target, *self.start.args[1:], value.dtype, value.device)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Collectives that one collective replaces.

    `whole_bytes` is the bytes of one rank's piece of the bucket in the whole program, left-out blocks included.
    """

    members: tuple[_BucketMember, ...]
    whole_bytes: float

    @classmethod
    def of_all(cls, members: Sequence[_BucketMember]) -> _Bucket:
        """Return the bucket of `members`, and of all left-out collectives that the members stand for."""
        return cls(tuple(members), sum(member.count * member.size for member in members))

    @property
    def metadata_member(self) -> _BucketMember:
        """The member whose metadata the new nodes get. If possible, the member lies outside of repeated blocks."""
        return min(self.members, key=lambda member: member.count)

    @property
    def times_as_large(self) -> float:
        """Bytes of the bucket in the whole program, divided by its bytes in this program; at least 1."""
        size = sum(member.size for member in self.members)
        return max(1.0, self.whole_bytes / size) if size else 1.0

    @property
    def is_written(self) -> bool:
        """Whether the graph changes: the bucket has several members, or is larger in the whole program."""
        return len(self.members) > 1 or self.times_as_large > 1


def _members(graph: fx.Graph, mesh: Mesh, units: LocalUnits) -> Iterator[_BucketMember]:
    """Yield the collectives of a graph that may go into buckets, in order. Each has one reader, its wait."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node, place in places.items():
        waits = [user for user in node.users if is_wait(user)]
        if _may_be_packed(node) and len(waits) == len(node.users) == 1:
            ranks = mesh.shards(group_axes(str(node.args[-1])))
            yield _BucketMember(node, waits[0], place, places[waits[0]], ranks, units.count(node))


def _may_be_packed(node: fx.Node) -> bool:
    """Whether a node is a collective whose operand can be joined with other operands.

    The operand of a reduce-scatter must have one row for each rank. The operand of an all-gather must have at least one
    dim.
    """
    if node.target is ALL_REDUCE:
        return True
    value: Any = node.all_input_nodes[0].meta["val"] if is_collective(node) else None
    if node.target is ALL_GATHER:
        return value.dim() > 0
    return node.target is REDUCE_SCATTER and value.shape[:1] == (node.args[2],)


def _rewritten(graph_module: fx.GraphModule, buckets: Sequence[_Bucket]) -> fx.GraphModule:
    made = _BucketRewrite(graph_module.graph)
    starts = {member.start: bucket for bucket in buckets for member in bucket.members}
    waits = {member.wait: (member, bucket) for bucket in buckets for member in bucket.members}
    for node in graph_module.graph.nodes:
        if node in waits:
            made.wait(*waits[node])
        elif node not in starts:
            made.copy(node)
        elif starts[node].members[-1].start is node:
            made.start(starts[node])
    return lazy_module(graph_module, made.made)


@dataclass(slots=True)
class _BucketRewrite:
    """Builds the copy of a graph with buckets, node by node.

    Args:
        made: the copy.
        copies: copy of each node of `graph`.
        started: the collective of each bucket in the copy. A key is the node in `graph` that starts the first member.
        parts: the call in the copy that splits the result of each bucket among its members, by the same keys.
        ranks: sort key of each node, by which the members of a bucket are ordered (`_ranks`).
    """

    graph: fx.Graph
    made: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    started: dict[fx.Node, fx.Node] = field(default_factory=dict)
    parts: dict[fx.Node, fx.Node] = field(default_factory=dict)
    tracer: LocalTracer = field(init=False)
    ranks: Mapping[fx.Node, int] = field(init=False)

    def __post_init__(self) -> None:
        self.tracer = LocalTracer(self.made)
        self.ranks = _ranks(self.graph)

    def copy(self, node: fx.Node) -> None:
        self.copies[node] = copy_node(self.made, node, self.copies.__getitem__)

    def start(self, bucket: _Bucket) -> None:
        last: Any = bucket.members[-1].start
        if len(bucket.members) == 1:
            self.copy(last)
            self.copies[last].meta[TIMES_AS_LARGE] = bucket.times_as_large
            return
        sent = [self.copies[member.operand] for member in self._packed(bucket)]
        rows, dims = ([last.args[2]], (1,)) if last.target is REDUCE_SCATTER else ([], ())
        flat = [self._call(_aten.view.default, (value, [*rows, -1]), last) for value in sent]
        packed = self._call(_aten.cat.default, (flat, *dims), bucket.metadata_member.start, bucket)
        args = (packed, *last.args[1:])
        self.started[bucket.members[0].start] = self._call(last.target, args, bucket.metadata_member.start, bucket)

    def wait(self, member: _BucketMember, bucket: _Bucket) -> None:
        """Emit the result of a member, in place of the wait for it.

        The result is the member's part of the bucket's result.
        """
        if len(bucket.members) == 1:
            self.copy(member.wait)
            return
        first, packed = bucket.members[0].start, self._packed(bucket)
        if first not in self.parts:
            self.parts[first] = self._parts(bucket)
        part = self._call(operator.getitem, (self.parts[first], packed.index(member)), member.wait)
        result = self._call(_aten.view.default, (part, member.shape), member.wait)
        result.meta |= {key: item for key, item in member.wait.meta.items() if key != "val"}
        self.copies[member.wait] = result

    def _parts(self, bucket: _Bucket) -> fx.Node:
        """Emit the wait for a bucket's collective, and the call that splits its result among the members.

        Parts of an all-gather's result are copies. Parts of a reduction's result are views.
        """
        first: Any = bucket.members[0].start
        like = bucket.metadata_member.wait
        received = self._call(WAIT, (self.started[first],), like, bucket)
        sizes = [math.prod(item.shape) for item in self._packed(bucket)]
        if first.target is not ALL_GATHER:
            dims = (1,) if first.target is REDUCE_SCATTER else ()
            return self._call(_aten.split_with_sizes.default, (received, sizes, *dims), like)
        ranks = first.args[1]
        rows = self._call(_aten.view.default, (received, [ranks, -1]), like)
        pieces = [size // ranks for size in sizes]
        return self._call(_aten.split_with_sizes_copy.default, (rows, pieces, 1), like, bucket)

    def _packed(self, bucket: _Bucket) -> list[_BucketMember]:
        return sorted(bucket.members, key=lambda member: self.ranks[member.wait])

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node, bucket: _Bucket | None = None) -> fx.Node:
        made = self.tracer.create_node("call_function", target, args, {})
        made.meta |= {key: like.meta[key] for key in ("phase", "module", "source") if key in like.meta}
        if bucket is not None and bucket.times_as_large > 1:
            made.meta[TIMES_AS_LARGE] = bucket.times_as_large
        return made


def _ranks(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return a sort key for each node, by which the members of a bucket are ordered.

    A wait may lead to a result of the graph through calls with one operand. The wait and these calls have the index of
    the result as their key. All other nodes have higher keys, in the order of the graph.
    """
    nodes = list(graph.nodes)
    ranks = {node: len(nodes) + place for place, node in enumerate(nodes)}
    results: Any = graph.output_node().args[0]
    for place, node in enumerate(results):
        while isinstance(node, fx.Node) and ranks[node] >= len(nodes):
            ranks[node] = place
            node = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 and not is_wait(node) else None
    return ranks
