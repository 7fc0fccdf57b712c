"""Expands `addmm(bias, a, b)` into `add(mm(a, b), bias)`, so that a phase can be compared with the uncut program."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module

_aten = torch.ops.aten


def expand_biases(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph with `mm` and `add` in place of each `addmm`; the graph itself if it has none."""
    if not any(node.target is _aten.addmm.default and not node.kwargs for node in graph_module.graph.nodes):
        return graph_module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        if node.target is _aten.addmm.default and not node.kwargs:
            bias, left, right = fx.map_arg(node.args, copies.__getitem__)  # type: ignore[misc]
            product = graph.call_function(_aten.mm.default, (left, right))
            copies[node] = graph.call_function(_aten.add.Tensor, (product, bias))
            product.meta, copies[node].meta = dict(node.meta), dict(node.meta)
        else:
            copies[node] = copy_node(graph, node, copies.__getitem__)
    return lazy_module(graph_module, graph)
