"""Expands a call that updates many parameters into one update for each, so that graphs can be compared.

It inverts `passes.lowering.bucket_updates`, whose joined calls are called buckets here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import fx

from autoshard.errors import VerificationError
from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.kernels.optimizers import MANY, tensors_of

_ONE: Mapping[Any, Any] = MappingProxyType({many: one for one, many in MANY.items()})


def expand_buckets(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph with one update for each parameter in place of each bucket.

    A graph without buckets is returned itself.

    Raises:
        VerificationError: a bucket has more tensors of one kind, such as parameters or gradients, than of another kind.
    """
    if not any(node.target in _ONE for node in graph_module.graph.nodes):
        return graph_module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        if node.target in _ONE:
            _write_out(graph, node, copies)
        else:
            copies[node] = copy_node(graph, node, copies.__getitem__)
    return lazy_module(graph_module, graph)


def _write_out(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> None:
    count = tensors_of(node.target)
    args: Any = fx.map_arg(node.args, copies.__getitem__)
    tensors, rest = args[:count], args[count:]
    if len(set(map(len, tensors))) != 1:
        counts = ", ".join(str(len(items)) for items in tensors)
        raise VerificationError(f"bucket {node.name!r} has {counts} parameters, gradients and state of each kind.")
    for operands in zip(*tensors, strict=True):
        graph.create_node("call_function", _ONE[node.target], (*operands, *rest))
