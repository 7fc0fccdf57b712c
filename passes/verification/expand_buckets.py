"""Write a bucket out again as the updates that it stands for, so that it can be compared with its source."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.errors import VerificationError
from autoshard.kernels.triton_adam import adam_updates_
from autoshard.tracing.lazy_module import lazy_module

_UPDATE: Any = torch.ops.autoshard.adam_update_.default


def expand_buckets(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph with each bucket as the updates that it stands for.

    Raises:
        VerificationError: a bucket has not as many gradients or moments as parameters.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        if node.target is not adam_updates_:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        *tensors, scale, hyper, decoupled, maximize = fx.map_arg(node.args, copies.__getitem__)
        if len(set(map(len, tensors))) != 1:
            counts = ", ".join(str(len(items)) for items in tensors)
            raise VerificationError(
                f"bucket {node.name!r} has {counts} parameters, gradients and moments of either kind."
            )
        for operands in zip(*tensors, strict=True):
            graph.create_node("call_function", _UPDATE, (*operands, scale, hyper, decoupled, maximize))
    return lazy_module(graph_module, graph)
