"""Turns a buffer that is filled part by part back into a `cat` of values, right before the buffer's collective.

It inverts `autoshard.graphs.fill_buckets`, so that `verify_in_place` can compare the graph with the functional graph.
Before → after: `flat = new_empty(x, [n]); p, q = split_with_sizes(flat, sizes)`, `mm.out(x, y, out=view(p, [k, n]))`,
`copy_(q, b)`, `all_reduce(flat)` → `a = mm(x, y)`, `all_reduce(cat([reshape(a, [-1]), reshape(b, [-1])]))`.

Each part of the buffer must be written once, and whole, before the collective, and nothing else may read or write the
buffer. Any other buffer stays as it is, and the comparison then fails.

`shaped_alike` brings the buckets of the functional graph into the same form. Views of a value in front of the bucket do
not change the order of its elements, so they are left out in both graphs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import fx

from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.fill_buckets import INTO
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.collectives import ALL_REDUCE, REDUCE_SCATTER
from passes.verification.expand_collectives import dims_of_rows

_aten = torch.ops.aten
_SPLIT = _aten.split_with_sizes.default
_FUNCTIONAL: Mapping[Any, Any] = MappingProxyType({into: target for target, into in INTO.items()})
_IN_ORDER = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.contiguous.default)
"""Calls that keep the order of their operand's elements."""


@dataclass(frozen=True, slots=True)
class _Filled:
    """A buffer that calls fill part by part.

    Args:
        writers: the calls that fill the buffer, in the order of its parts.
        inner: the nodes that the rewrite removes.
    """

    buffer: fx.Node
    writers: Sequence[fx.Node]
    inner: frozenset[fx.Node]


def pack_buckets(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph with a `cat` in place of each filled buffer; the graph itself if it has no buffers."""
    graph = graph_module.graph
    places = {node: place for place, node in enumerate(graph.nodes)}
    buffers = graph.find_nodes(op="call_function", target=_aten.new_empty.default)
    found = {started: item for node in buffers for started, item in _filled(node, places).items()}
    return _packed(graph_module, found) if found else graph_module


def shaped_alike(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a functional graph in which each bucket has the form that `pack_buckets` gives buffers.

    Each member of a bucket is reshaped once. Views in front of the reshape are left out.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph_module.graph.nodes:
        rows = _rows_of(node) if any(map(_is_reduction, node.users)) else None
        if rows is None:
            copies[node] = copy_node(graph, node, copies.__getitem__)
        else:
            copies[node] = _cat(graph, [copies[_in_any_shape(item)] for item in node.args[0]], rows)
            copies[node].meta = dict(node.meta)
    return lazy_module(graph_module, graph)


def _rows_of(packed: fx.Node) -> list[int] | None:
    """Return the number of ranks of a bucket for a reduce-scatter, as [ranks], or [] for a bucket of an all-reduce.

    None is returned if the `packed` node is not the `cat` of a bucket.
    """
    if packed.target is not _aten.cat.default or packed.kwargs:
        return None
    flat: Any = packed.args[0]
    rows = list(flat[0].args[1][:1]) if packed.args[1:] == (1,) and flat[0].target is _aten.view.default else []
    are_flat = all(item.target is _aten.view.default and list(item.args[1]) == [*rows, -1] for item in flat)
    return rows if are_flat and packed.args[1:] == dims_of_rows(rows) else None


def _packed(graph_module: fx.GraphModule, found: Mapping[fx.Node, _Filled]) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    inner = frozenset[fx.Node]().union(*(item.inner for item in found.values()))
    for node in graph_module.graph.nodes:
        if node in inner:
            continue
        if node in found:
            copies[found[node].buffer] = _bucket(graph, found[node], copies)
        target = _FUNCTIONAL.get(node.target)
        if target is not None and node.kwargs.get("out") in inner:
            copies[node] = graph.call_function(target, fx.map_arg(node.args, copies.__getitem__))
            copies[node].meta = dict(node.meta)
        else:
            copies[node] = copy_node(graph, node, copies.__getitem__)
    return lazy_module(graph_module, graph)


def _filled(buffer: fx.Node, places: Mapping[fx.Node, int]) -> dict[fx.Node, _Filled]:
    """Return a filled buffer as a dict from its collective to the buffer.

    The dict is empty unless each part of the buffer is written once, and whole, before the collective.
    """
    splits = [user for user in buffer.users if user.target is _SPLIT]
    sent = [user for user in buffer.users if _is_reduction(user)]
    if (len(splits), len(sent), len(buffer.users), len(buffer.args), len(buffer.kwargs)) != (1, 1, 2, 2, 0):
        return {}
    (split,), (started,), (like, shape) = splits, sent, buffer.args
    *rows, length = cast(list[int], shape)
    sizes = cast(list[int], split.args[1])
    parts = [part for index in range(len(sizes)) for part in split.users if _is_part(part, index)]
    is_cut = (
        split.args == (buffer, sizes, *dims_of_rows(rows))
        and not split.kwargs
        and len(rows) < 2
        and sum(sizes) == length
    )
    if not is_cut or len(parts) != len(sizes) or len(split.users) != len(sizes):
        return {}
    found = [_writer(part, [*rows, size], cast(fx.Node, like)) for part, size in zip(parts, sizes, strict=True)]
    writers = [writer for writer in found if writer is not None and places[writer] < places[started]]
    if len(writers) != len(found):
        return {}
    inner = [cast(fx.Node, writer.kwargs.get("out", writer)) for writer in writers]
    return {started: _Filled(buffer, writers, frozenset((buffer, split, *parts, *inner)))}


def _is_part(node: fx.Node, index: int) -> bool:
    return node.target is operator.getitem and type(node.args[1]) is int and node.args[1] == index


def _writer(part: fx.Node, shape: list[int], like: fx.Node) -> fx.Node | None:
    """Return the call that alone writes a part of a buffer, and writes it whole, or None if there is no such call.

    `shape` is the shape of the part. `like` is a node with the dtype and device of the buffer.
    """
    if len(part.users) != 1:
        return None
    (user,) = part.users
    if user.target is _aten.copy_.default:
        is_whole = user.args[0] is part and user.args[1] is not part and _is_alike(user.args[1], like, shape)
        return user if is_whole and len(user.args) == 2 and not user.kwargs and not user.users else None
    if user.target is not _aten.view.default or len(user.users) != 1 or user.kwargs or len(shape) > 1:
        return None
    (writer,), shaped = user.users, cast(list[int], user.args[1])
    is_given = writer.target in _FUNCTIONAL and writer.kwargs == {"out": user} and user not in writer.args
    is_whole = _is_alike(writer, like, shaped) and math.prod(shaped) == shape[0]
    return writer if is_given and is_whole and not writer.users else None


def _is_alike(value: Any, like: fx.Node, shape: Sequence[int]) -> bool:
    one, other = value.meta.get("val"), like.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return list(one.shape) == list(shape) and (one.dtype, one.device) == (other.dtype, other.device)


def _bucket(graph: fx.Graph, item: _Filled, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    values = [node.args[1] if node.target is _aten.copy_.default else node for node in item.writers]
    shape: Any = item.buffer.args[1]
    made = _cat(graph, [copies[_in_any_shape(value)] for value in values], shape[:-1])
    made.meta = dict(item.buffer.meta)
    return made


def _cat(graph: fx.Graph, values: Sequence[fx.Node], rows: Sequence[int]) -> fx.Node:
    flat = [graph.call_function(_aten.reshape.default, (value, [*rows, -1])) for value in values]
    return graph.call_function(_aten.cat.default, (flat, *dims_of_rows(rows)))


def _in_any_shape(value: Any) -> Any:
    """Return the value from which `value` is made by calls of `_IN_ORDER` alone. They change no order of elements."""
    while value.target in _IN_ORDER and not value.kwargs:
        value = value.args[0]
    return value


def _is_reduction(node: fx.Node) -> bool:
    return node.target in (ALL_REDUCE, REDUCE_SCATTER)
