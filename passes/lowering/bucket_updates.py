"""Joins the optimizer updates of many parameters in one call, in a graph that writes in place.

Before → after: `adam_update_(p, g, m, v, scale, hyper, ...)` of each parameter → one `adam_updates_([p, ...], [g, ...],
[m, ...], [v, ...], scale, hyper, ...)` for all updates with equal other arguments. SGD and other optimizers are joined
in the same way.

An update may move past calls that neither read nor write its written memory, and do not write its operands. A gather of
an updated parameter moves behind the joined call, with everything that depends on the gather. If no such order exists,
because dependences form a cycle, all updates stay as they are. `passes.verification.expand_buckets` inverts the rewrite
for verification.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.graphs.write_in_place import roots_of
from autoshard.kernels.optimizers import MANY, tensors_of
from passes.verification.verify_in_place import written_operands


@dataclass(frozen=True, slots=True)
class _UpdateBucket:
    """Two or more updates, in the order of the graph, that become one call of the operator `target`."""

    target: Any
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class BucketUpdates:
    """Joins updates of parameters whose arguments are equal, except for the tensors that belong to each parameter."""

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Return a copy of a graph that writes in place, with joined updates.

        If no updates can be joined, the graph itself is returned.
        """
        bucket_of = {node: bucket for bucket in _buckets(graph_module.graph) for node in bucket.nodes}
        order = _order(graph_module.graph, bucket_of) if bucket_of else None
        if order is None:
            return graph_module
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in order:
            if node in bucket_of:
                _add_bucket(graph, bucket_of[node], copies)
            else:
                copies[node] = copy_node(graph, node, copies.__getitem__)
        return lazy_module(graph_module, graph)


def _add_bucket(graph: fx.Graph, bucket: _UpdateBucket, copies: Mapping[fx.Node, fx.Node]) -> None:
    first, *_ = bucket.nodes
    count = tensors_of(bucket.target)
    tensors = tuple([node.args[index] for node in bucket.nodes] for index in range(count))
    args = fx.map_arg((*tensors, *first.args[count:]), copies.__getitem__)
    graph.create_node("call_function", bucket.target, args).meta = dict(first.meta)


def _buckets(graph: fx.Graph) -> Iterator[_UpdateBucket]:
    alike: defaultdict[tuple[object, ...], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target in MANY:
            target = MANY[node.target]
            alike[(target, *node.args[tensors_of(target) :])].append(node)
    for (target, *_), nodes in alike.items():
        if len(nodes) > 1:
            yield _UpdateBucket(target, tuple(nodes))


def _order(graph: fx.Graph, bucket_of: Mapping[fx.Node, _UpdateBucket]) -> list[fx.Node] | None:
    """Return the nodes in an order in which each bucket is one call, or None if no such order exists.

    The first update of a bucket stands for the call. Nodes that do not depend on each other keep their order.
    """
    names = {node: bucket_of[node].nodes[0] if node in bucket_of else node for node in graph.nodes}
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
    """Yield each node with the set of nodes that must stay before it.

    These are its operands, and earlier calls that write memory that the node reads or writes. Earlier readers of memory
    that the node writes are in the set too. A view counts as a reader, because it may become a copy.
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
