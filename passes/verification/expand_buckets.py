"""Expands a call that updates many parameters into one update for each, so that graphs can be compared.

It inverts `passes.lowering.bucket_updates`, whose joined calls are called buckets here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autoshard.errors import VerificationError
from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.kernels.optimizers import MANY, tensors_of

_ONE: Mapping[Any, Any] = MappingProxyType({many: one for one, many in MANY.items()})
_TRITON_ADAM = "autoshard::triton_adam_updates_"


def expand_buckets(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph with one update for each parameter in place of each bucket.

    A graph without buckets is returned itself.

    Raises:
        VerificationError: a bucket has more tensors of one kind, such as parameters or gradients, than of another kind.
    """
    ones = {node: one for node in graph_module.graph.nodes for one in (_one_of(node),) if one is not None}
    if not ones:
        return graph_module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        if node in ones:
            _write_out(graph, node, ones[node], copies)
        else:
            copies[node] = copy_node(graph, node, copies.__getitem__)
    return lazy_module(graph_module, graph)


def _write_out(graph: fx.Graph, node: fx.Node, one: Any, copies: Mapping[fx.Node, fx.Node]) -> None:
    count = tensors_of(node.target)
    args: Any = fx.map_arg(node.args, copies.__getitem__)
    tensors, rest = args[:count], args[count:]
    if len(set(map(len, tensors))) != 1:
        counts = ", ".join(str(len(items)) for items in tensors)
        raise VerificationError(f"bucket {node.name!r} has {counts} parameters, gradients and state of each kind.")
    for operands in zip(*tensors, strict=True):
        graph.create_node("call_function", one, (*operands, *rest))


def _one_of(node: fx.Node) -> Any:
    """Return the operator that updates one parameter, for a call that updates many; None for any other node."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target._schema.name == _TRITON_ADAM:
        return torch.ops.autoshard.adam_update_.default
    return _ONE.get(target)
