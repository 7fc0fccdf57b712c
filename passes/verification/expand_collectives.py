"""Expands a bucket into single collectives, so that a graph with buckets can be compared with the graph without.

Before → after: `split(wait(all_reduce(cat([view(a), view(b)]))))` → `wait(all_reduce(a))`, `wait(all_reduce(b))`. The
collective reduces elements at equal indices. So each part of its result equals the collective of `a` or `b` alone. For
a reduce-scatter, values are joined side by side in one row for each rank. An all-gather returns such rows.

A bucket of another form, or with other readers, is not expanded. The comparison then fails.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autoshard.errors import VerificationError
from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT

_aten = torch.ops.aten
_SPLIT, _SPLIT_ROWS = _aten.split_with_sizes.default, _aten.split_with_sizes_copy.default
"""Operators that split a bucket's result: by views, or by copies out of gathered rows."""


@dataclass(frozen=True, slots=True)
class _PackedCollective:
    """One collective for several values.

    Args:
        started: the node that starts the collective.
        values: the values that it sends.
        shapes: the shapes of the values' parts of the result.
        inner: the nodes that only pack and unpack the values, for removal.
    """

    started: Any
    values: Sequence[fx.Node]
    shapes: Sequence[list[int]]
    inner: frozenset[fx.Node]


def expand_collectives(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph with single collectives in place of each bucket; the graph itself without buckets.

    Raises:
        VerificationError: a node reads a bucket's split result in another way than by `getitem` and then `view`.
    """
    found = ((node, _bucket_of(node)) for node in graph_module.graph.nodes)
    buckets = {node: bucket for node, bucket in found if bucket is not None}
    return _Expanding(graph_module.graph, buckets).run(graph_module) if buckets else graph_module


def _bucket_of(split: fx.Node) -> _PackedCollective | None:
    """Return the bucket whose result the node `split` splits into parts, or None if `split` ends no bucket."""
    if split.target not in (_SPLIT, _SPLIT_ROWS) or len(split.args) < 2 or split.kwargs:
        return None
    received: Any = split.args[0]
    in_rows: Any = _operand(received, _aten.view.default)
    waited = received if in_rows is None else in_rows
    started: Any = _operand(waited, WAIT)
    if started is None or started.target not in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER):
        return None
    is_gathered = started.target is ALL_GATHER
    if is_gathered != (split.target is _SPLIT_ROWS) or is_gathered != (in_rows is not None):
        return None
    if is_gathered and received.args[1:] != ([started.args[1], -1],):
        return None
    packed: Any = _operand(started, started.target)
    rows = [started.args[2]] if started.target is REDUCE_SCATTER else []
    flat = None if packed is None else _flat_values(packed, rows)
    inner: list[Any] = [received, waited, started, packed]
    if flat is None or any(len(node.users) != 1 for node in inner):
        return None
    values = [node.args[0] for node in flat]
    if is_gathered and any(value.meta["val"].dim() == 0 for value in values):
        return None
    sizes = [value.meta["val"].numel() // math.prod(rows) for value in values]
    if split.args[1:] != (sizes, *dims_of_rows([1] if is_gathered else rows)):
        return None
    shapes = [_shape_given(started, list(value.meta["val"].shape)) for value in values]
    return _PackedCollective(started, values, shapes, frozenset((*inner, *flat)))


def _shape_given(started: fx.Node, shape: list[int]) -> list[int]:
    """Return the shape of the result of the collective `started`, if its operand has the shape `shape`."""
    if started.target is ALL_REDUCE:
        return shape
    ranks: Any = started.args[1]
    return [1, *shape[1:]] if started.target is REDUCE_SCATTER else [ranks * shape[0], *shape[1:]]


def dims_of_rows(rows: Sequence[int]) -> tuple[int, ...]:
    """Return the dim argument of a bucket's `cat` or `split`, as a tuple.

    It is (1,) if `rows` has a number of ranks, as for a reduce-scatter. Otherwise it is empty.
    """
    return (1,) if rows else ()


def _operand(node: Any, target: OpOverload) -> Any:
    """Return the first operand of `node` if it is a call of `target`; None otherwise."""
    if not isinstance(node, fx.Node) or node.target is not target or not node.args or node.kwargs:
        return None
    return node.args[0] if isinstance(node.args[0], fx.Node) else None


def _flat_values(packed: fx.Node, rows: Sequence[int]) -> Sequence[Any] | None:
    """Return the flattened values that `packed` joins, or None if `packed` is not the `cat` of a bucket.

    For a reduce-scatter, `rows` has the number of ranks, and each value has one row for each rank. Otherwise `rows` is
    empty.
    """
    if packed.target is not _aten.cat.default or packed.args[1:] != dims_of_rows(rows) or packed.kwargs:
        return None
    flat: Any = packed.args[0]
    values = [_operand(item, _aten.view.default) for item in flat]
    is_flat = all(value is not None for value in values)
    is_flat = is_flat and all(item.args[1:] == ([*rows, -1],) and len(item.users) == 1 for item in flat)
    is_flat = is_flat and all(list(value.meta["val"].shape[:1]) == rows for value in values if rows)
    return flat if is_flat and len({value.meta["val"].dtype for value in values}) == 1 else None


@dataclass(slots=True)
class _Expanding:
    """Builds the copy of a graph without buckets.

    Args:
        made: the copy.
        parts: for each part of a bucket's result, the packed value to which it belongs.
    """

    graph: fx.Graph
    buckets: Mapping[fx.Node, _PackedCollective]
    made: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    parts: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        inner = frozenset().union(*(bucket.inner for bucket in self.buckets.values())) | self.buckets.keys()
        for node in self.graph.nodes:
            self._check(node)
            if node in inner:
                continue
            source: Any = node.args[0] if node.args else None
            if node.target is operator.getitem and source in self.buckets:
                self.parts[node] = self._value(node)
            elif node.target is _aten.view.default and source in self.parts:
                self.copies[node] = self._collective(node)
            else:
                self.copies[node] = copy_node(self.made, node, self.copies.__getitem__)
        return lazy_module(graph_module, self.made)

    def _check(self, node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            if operand in self.parts and node.target is not _aten.view.default:
                raise VerificationError(f"{node.format_node()} reads {operand.name!r}, a part of a bucket, unshaped.")
            if operand in self.buckets and node.target is not operator.getitem:
                raise VerificationError(f"{node.format_node()} reads all parts of bucket {operand.name!r}.")

    def _value(self, part: fx.Node) -> fx.Node:
        """Return the packed value of `part`, a `getitem` node that selects a part of a bucket's result.

        Raises:
            VerificationError: the bucket has no such part.
        """
        source: Any = part.args[0]
        bucket, index = self.buckets[source], part.args[1]
        if not isinstance(index, int) or not 0 <= index < len(bucket.values):
            raise VerificationError(f"{part.format_node()} reads a part that its bucket does not have.")
        return bucket.values[index]

    def _collective(self, shaped: fx.Node) -> fx.Node:
        """Emit the collective of a single value, and the wait for it, in place of `shaped`. Return the wait.

        `shaped` is a part of a bucket's result, reshaped to the value's shape.

        Raises:
            VerificationError: the part is reshaped to another shape.
        """
        part: Any = shaped.args[0]
        value, bucket = self.parts[part], self.buckets[part.args[0]]
        if shaped.args[1:] != (bucket.shapes[part.args[1]],) or shaped.kwargs:
            raise VerificationError(f"{shaped.format_node()} has another shape than its value {value.name!r}.")
        started = self.made.call_function(bucket.started.target, (self.copies[value], *bucket.started.args[1:]))
        waited = self.made.call_function(WAIT, (started,))
        started.meta = waited.meta = {key: item for key, item in shaped.meta.items() if key != "val"}
        return waited
