"""Update many parameters in one launch, in a graph that writes in place.

Before → after: `adam_update_(p, g, m, v, scale, hyper, ...)` of each parameter → one `triton_adam_updates_([p, ...],
[g, ...], [m, ...], [v, ...], scale, hyper, ...)` for all whose other arguments and dtypes agree.

An update may move, to its bucket, past whatever neither touches the memory that it writes nor writes what it reads: who
gathers an updated parameter comes behind the bucket, and so does what depends on it. Where the order that is left has a
cycle, updates stay as they are. `passes.verification.expand_buckets` is the way back, by which the result is verified.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.kernels.triton_adam import adam_updates_, why_not_adam_updates
from autoshard.runtime.write_in_place import roots_of
from autoshard.tracing.lazy_module import lazy_module
from passes.verification.verify_in_place import written_operands

_UPDATE: Any = torch.ops.autoshard.adam_update_.default
_TENSORS = 4
"""An update begins with parameter, gradient and both moments."""


def bucket_updates(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that writes in place, with its updates of Adam in buckets; see the module's docstring."""
    bucket_of = {node: bucket for bucket in _buckets(graph_module.graph) for node in bucket}
    order = _order(graph_module.graph, bucket_of)
    if order is None:
        return graph_module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in order:
        if node in bucket_of:
            _add_bucket(graph, bucket_of[node], copies)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta)
    return lazy_module(graph_module, graph)


def _add_bucket(graph: fx.Graph, bucket: Sequence[fx.Node], copies: Mapping[fx.Node, fx.Node]) -> None:
    tensors = tuple([node.args[index] for node in bucket] for index in range(_TENSORS))
    args = fx.map_arg((*tensors, *bucket[0].args[_TENSORS:]), copies.__getitem__)
    graph.create_node("call_function", adam_updates_, args).meta = dict(bucket[0].meta)


def _buckets(graph: fx.Graph) -> Iterator[tuple[fx.Node, ...]]:
    """Updates, two or more, that one launch can do."""
    alike: defaultdict[tuple[object, ...], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is _UPDATE:
            values = [value for operand in node.args[:_TENSORS] for value in (_value(operand),) if value is not None]
            if len(values) == _TENSORS and why_not_adam_updates(*([value] for value in values)) is None:
                alike[(*node.args[_TENSORS:], *(value.dtype for value in values))].append(node)
    yield from (tuple(nodes) for nodes in alike.values() if len(nodes) > 1)


def _value(operand: Any) -> Tensor | None:
    """What is known of an operand: of a copy, from what it is a copy of."""
    while "val" not in operand.meta and operand.all_input_nodes:
        operand = operand.all_input_nodes[0]
    return operand.meta.get("val")


def _order(graph: fx.Graph, bucket_of: Mapping[fx.Node, Sequence[fx.Node]]) -> list[fx.Node] | None:
    """The nodes with each bucket at one place, named by its first node; None where there is no such order.

    Of what may come next, the earliest node of the graph does.
    """
    names = {node: bucket_of[node][0] if node in bucket_of else node for node in graph.nodes}
    places = {node: place for place, node in enumerate(graph.nodes)}
    waits: dict[fx.Node, set[fx.Node]] = {name: set() for name in names.values()}
    for node, needed in _dependences(graph):
        waits[names[node]] |= {names[other] for other in needed} - {names[node]}
    followers: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for name, needed in waits.items():
        for other in needed:
            followers[other].append(name)
    missing = {name: len(needed) for name, needed in waits.items()}
    ready = [(places[name], name) for name, count in missing.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for follower in followers[name]:
            missing[follower] -= 1
            if missing[follower] == 0:
                heapq.heappush(ready, (places[follower], follower))
    return order if len(order) == len(waits) else None


def _dependences(graph: fx.Graph) -> Iterator[tuple[fx.Node, set[fx.Node]]]:
    """Each node with those that must stay before it: its operands, and by what it reads and writes in memory.

    A view counts as a read: where there is no such view, it is a copy.
    """
    writer: dict[fx.Node, fx.Node] = {}
    readers: defaultdict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node in graph.nodes:
        written = {root for operand in written_operands(node) for root in roots_of(operand)}
        touched = {root for operand in node.all_input_nodes for root in roots_of(operand)}
        needed = set(node.all_input_nodes) | {writer[root] for root in touched if root in writer}
        yield node, needed | {reader for root in written for reader in readers[root]}
        for root in touched:
            readers[root].add(node)
        for root in written:
            writer[root], readers[root] = node, set()
