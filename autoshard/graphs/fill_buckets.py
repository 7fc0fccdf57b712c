"""Computes or copies bucket members directly into their bucket, in a graph that runs as it is.

Before → after: `a = mm(x, y); b = f(z); started = all_reduce(cat([view(a, [-1]), view(b, [-1])]))` → `flat =
new_empty(x, [n]); p, q = split_with_sizes(flat, sizes)`, `mm.out(x, y, out=view(p, [k, n]))`, `copy_(q, view(f(z),
[-1]))`, `started = all_reduce(flat)`. So a gradient that is a product or a sum is computed at its place in the bucket.
Other gradients are copied while they are in the cache, and freed. The buffer lives from its first write. In a
reduce-scatter each member has a row for each rank, and all members are copied.

Functional graphs are planned, simulated and proven. Processes run the graph with writes, and memory and prices describe
that graph. `passes.verification.pack_buckets` inverts the rewrite for verification.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.collectives import ALL_REDUCE, REDUCE_SCATTER

_aten = torch.ops.aten
INTO: Mapping[Any, Any] = MappingProxyType(
    {_aten.mm.default: _aten.mm.out, _aten.sum.dim_IntList: _aten.sum.IntList_out, _aten.add.Tensor: _aten.add.out}
)
"""Operators that compute gradients, with their variants that write into given memory."""

_SHAPED = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.contiguous.default)
"""Calls that keep the order of their operand's elements."""

_ALIGNED_BYTES = 64
"""Alignment of fresh memory. At other addresses kernels are slower, and may round differently."""


@dataclass(frozen=True, slots=True)
class Member:
    """A value in a bucket.

    Args:
        flat: the value in one row, or in one row for each rank.
        computed: the call that computes the value into the bucket; None for a copied value.
    """

    flat: fx.Node
    computed: fx.Node | None

    @property
    def value(self) -> fx.Node:
        """The copied or computed value."""
        return self.flat.all_input_nodes[0] if self.computed is None else self.computed

    @property
    def size_bytes(self) -> int:
        """Size of the value in bytes."""
        value = self.flat.meta["val"]
        return value.numel() * value.element_size()


def fill_buckets(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph with its buckets filled in place, or the graph itself without buckets."""
    graph = filled(graph_module.graph)
    return graph_module if graph is graph_module.graph else lazy_module(graph_module, graph)


def filled(graph: fx.Graph) -> fx.Graph:
    """Like `fill_buckets`, for an fx graph."""
    packed = graph.find_nodes(op="call_function", target=_aten.cat.default)
    buckets = {node: members for node in packed if (members := members_of(node))}
    return _Filling(graph, buckets).run() if buckets else graph


def members_of(packed: fx.Node) -> list[Member]:
    """The members of a reduced bucket in order; empty for any other call, and if all members are inputs."""
    started = next(iter(packed.users), None)
    if packed.target is not _aten.cat.default or len(packed.users) != 1 or started is None:
        return []
    flat: Any = packed.args[0]
    if started.target not in (ALL_REDUCE, REDUCE_SCATTER) or not all(map(_is_flat, flat)):
        return []
    sizes = (Member(item, None).size_bytes for item in flat)
    places = accumulate(sizes, initial=0)
    in_rows = started.target is REDUCE_SCATTER
    members = [Member(item, None if in_rows else _computed(item, at)) for item, at in zip(flat, places, strict=False)]
    return members if any(member.value.op == "call_function" for member in members) else []


def _is_flat(item: fx.Node) -> bool:
    return item.target is _aten.view.default and len(item.users) == 1


def _computed(flat: fx.Node, place_bytes: int) -> fx.Node | None:
    """The call that can compute a member at its place, because nothing else reads its result."""
    value = flat
    while value.target in _SHAPED and len(value.users) == 1:
        (value,) = value.all_input_nodes
    if place_bytes % _ALIGNED_BYTES or len(value.users) != 1 or value.target not in INTO or value.kwargs:
        return None
    return value if value.meta["val"].is_contiguous() else None


@dataclass(slots=True)
class _Filling:
    """Copies a graph with its buckets filled in place.

    Args:
        graph: the graph.
        buckets: the members of each bucket, by the packing call.
        made: the copy.
        copies: the copies of nodes.
        parts: the split of each started bucket.
        given: member inputs, which wait for their bucket to start.
    """

    graph: fx.Graph
    buckets: Mapping[fx.Node, Sequence[Member]]
    made: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    parts: dict[fx.Node, fx.Node] = field(default_factory=dict)
    given: dict[fx.Node, list[int]] = field(default_factory=dict)

    def run(self) -> fx.Graph:
        """The copy."""
        written: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
        left_out = set(self.buckets)
        for packed, members in self.buckets.items():
            for index, member in enumerate(members):
                written.setdefault(member.value, []).append((packed, index))
                left_out |= _between(member)
        for node in self.graph.nodes:
            if node in left_out:
                continue
            places = written.get(node, [])
            if not any(self.buckets[packed][index].computed for packed, index in places):
                self.copies[node] = self.made.node_copy(node, self.copies.__getitem__)
                self.copies[node].meta = dict(node.meta)
            for packed, index in places:
                self._write(packed, index)
        return self.made

    def _write(self, packed: fx.Node, index: int) -> None:
        member = self.buckets[packed][index]
        if packed not in self.parts:
            if member.value.op != "call_function":
                self.given.setdefault(packed, []).append(index)
                return
            self._begin(packed, member)
        part = self._call(operator.getitem, (self.parts[packed], index), member.flat)
        part.meta["val"] = self.parts[packed].meta["val"][index]
        if member.computed is None:
            shaped = self._call(_aten.view.default, (self.copies[member.value], *member.flat.args[1:]), member.flat)
            self._call(_aten.copy_.default, (part, shaped), member.flat)
            return
        shape = list(member.computed.meta["val"].shape)
        place = self._call(_aten.view.default, (part, shape), member.computed)
        args = fx.map_arg(member.computed.args, self.copies.__getitem__)
        self._call(INTO[member.computed.target], args, member.computed, out=place)

    def _begin(self, packed: fx.Node, first: Member) -> None:
        """Allocate a bucket, and copy the members that exist already."""
        value = packed.meta["val"]
        like = next(node for node in (first.value, *first.value.all_input_nodes) if node in self.copies)
        buffer = self._call(_aten.new_empty.default, (self.copies[like], list(value.shape)), packed)
        sizes = [member.flat.meta["val"].shape[-1] for member in self.buckets[packed]]
        args = (buffer, sizes, *packed.args[1:])
        self.parts[packed] = self._call(_aten.split_with_sizes.default, args, packed)
        self.parts[packed].meta["val"] = _aten.split_with_sizes.default(value, *args[1:])
        self.copies[packed] = buffer
        for index in self.given.pop(packed, ()):
            self._write(packed, index)

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any) -> fx.Node:
        made = self.made.call_function(target, args, kwargs)
        made.meta = dict(like.meta)
        return made


def _between(member: Member) -> set[fx.Node]:
    """The calls between the computation of a member and its flat form."""
    found, node = {member.flat}, member.flat
    while member.computed is not None and node is not member.computed:
        found.add(node)
        (node,) = node.all_input_nodes
    return found
