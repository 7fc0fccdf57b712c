"""Writes gradients directly into the buffer of their bucket. A bucket is one collective for several gradients.

Before:

    a = mm(x, y)
    b = f(z)
    started = all_reduce(cat([view(a, [-1]), view(b, [-1])]))

After:

    flat = new_empty(x, [n])
    p, q = split_with_sizes(flat, sizes)
    mm.out(x, y, out=view(p, shape_of_a))
    copy_(q, view(f(z), [-1]))
    started = all_reduce(flat)

A gradient that is a matrix product or a sum is computed in the buffer itself. Other gradients are copied right after
their computation, while they are in the cache, and are then freed. The buffer is allocated at its first write. In a
reduce-scatter each gradient has a row for each rank, and all gradients are copied.

Processes run the rewritten graph, and predictions of memory and time describe it. Planning, the simulator and the proof
use the functional graph. `passes.verification.pack_buckets` turns a rewritten graph back into its functional form.
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

from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.collectives import ALL_REDUCE, REDUCE_SCATTER

_aten = torch.ops.aten
INTO: Mapping[Any, Any] = MappingProxyType(
    {_aten.mm.default: _aten.mm.out, _aten.sum.dim_IntList: _aten.sum.IntList_out, _aten.add.Tensor: _aten.add.out}
)
"""From an operator that computes gradients to its `out` variant, which writes its result into a given tensor."""

_SHAPED = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.contiguous.default)
"""Operators whose result has the elements of their operand in the same order."""

_ALIGNED_BYTES = 64
"""Alignment of new tensors in bytes. At other addresses kernels are slower, and may round differently."""


@dataclass(frozen=True, slots=True)
class Member:
    """A value, usually a gradient, that a bucket packs.

    Args:
        flat: the `view` of the value as [elements], or as [ranks, elements] for a reduce-scatter.
        computed: the call that computes the value directly into the buffer. None if the value is copied.
    """

    flat: fx.Node
    computed: fx.Node | None

    @property
    def value(self) -> fx.Node:
        """The node of the value, before its flattening into `flat`."""
        return self.flat.all_input_nodes[0] if self.computed is None else self.computed

    @property
    def size_bytes(self) -> int:
        """Size of the value on a rank, in bytes."""
        value = self.flat.meta["val"]
        return value.numel() * value.element_size()


def fill_buckets(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph module in which values are written into the buffers of their buckets.

    A graph without buckets is returned as it is.
    """
    graph = filled(graph_module.graph)
    return graph_module if graph is graph_module.graph else lazy_module(graph_module, graph)


def filled(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` in which values are written into the buffers of their buckets.

    Without buckets, return `graph` itself.
    """
    packed = graph.find_nodes(op="call_function", target=_aten.cat.default)
    buckets = {node: members for node in packed if (members := members_of(node))}
    return _Filling(graph, buckets).run() if buckets else graph


def members_of(packed: fx.Node) -> list[Member]:
    """Return the values that the `cat` call `packed` puts into a bucket, in order.

    Empty if `packed` is no bucket of an all-reduce or a reduce-scatter, or if all its values are inputs.
    """
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
    """Return the call that computes `flat`, if it can write its result directly into the bucket's buffer; else None.

    It can if an operator of `INTO` computes a contiguous result that only the bucket reads. The result's place in the
    buffer, at byte `place_bytes`, must be aligned.
    """
    value = flat
    while value.target in _SHAPED and len(value.users) == 1:
        (value,) = value.all_input_nodes
    if place_bytes % _ALIGNED_BYTES or len(value.users) != 1 or value.target not in INTO or value.kwargs:
        return None
    return value if value.meta["val"].is_contiguous() else None


@dataclass(slots=True)
class _Filling:
    """Copies a graph and rewrites its buckets on the way.

    Args:
        copies: copy in `made`, the new graph, by node of `graph`.
        parts: the `split_with_sizes` call in `made` that cuts a bucket's buffer into members, by the bucket's `cat`
            call.
        given: indices of a bucket's members that are inputs, by the bucket's `cat` call. They are copied once the
            buffer is allocated.
    """

    graph: fx.Graph
    buckets: Mapping[fx.Node, Sequence[Member]]
    made: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    parts: dict[fx.Node, fx.Node] = field(default_factory=dict)
    given: dict[fx.Node, list[int]] = field(default_factory=dict)

    def run(self) -> fx.Graph:
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
                self.copies[node] = copy_node(self.made, node, self.copies.__getitem__)
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
        """Allocate the buffer of the bucket `packed`, and copy into it the members that are inputs of the graph."""
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
    """Return the views of a member that the rewrite drops: `flat`, and the views between `computed` and `flat`."""
    found, node = {member.flat}, member.flat
    while member.computed is not None and node is not member.computed:
        found.add(node)
        (node,) = node.all_input_nodes
    return found
