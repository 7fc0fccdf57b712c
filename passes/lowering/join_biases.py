"""Joins a matrix product and the addition of a bias in one `addmm`.

Before → after: `add(mm(a, b), bias)` → `addmm(bias, a, b)`, if nothing else reads the product and the bias has the
shape [N] of the product's columns. A product that is reduced over ranks before the addition stays as it is.
`passes.verification.expand_biases` inverts the rewrite for verification.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.lowered import PhasedProgram
from passes.lowering.rewrite_phases import rewrite_phases

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class JoinBiases:
    """Joins matrix products with the biases that are added to them, in each phase."""

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        return rewrite_phases(phased, _joined)


def _joined(graph_module: fx.GraphModule) -> fx.GraphModule:
    products = {node: product for node in graph_module.graph.nodes if (product := _product_of(node)) is not None}
    if not products:
        return graph_module
    graph, copies, left_out = fx.Graph(), dict[fx.Node, fx.Node](), set(products.values())
    for node in graph_module.graph.nodes:
        if node in products:
            args = fx.map_arg((node.args[1], *products[node].args), copies.__getitem__)
            copies[node] = graph.create_node("call_function", _aten.addmm.default, args, name=node.name)
        elif node not in left_out:
            copies[node] = copy_node(graph, node, copies.__getitem__)
        if node in copies:
            copies[node].meta = dict(node.meta)
    return lazy_module(graph_module, graph)


def _product_of(node: fx.Node) -> fx.Node | None:
    """Return the matrix product to which `node` adds a bias, or None if `addmm` cannot replace both calls."""
    if node.target is not _aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    product, bias = node.args
    if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node) or product.target is not _aten.mm.default:
        return None
    if len(product.users) != 1 or product.kwargs:
        return None
    return product if _is_bias(bias.meta.get("val"), node.meta.get("val"), product.meta.get("val")) else None


def _is_bias(bias: Any, total: Any, product: Any) -> bool:
    if not all(isinstance(value, torch.Tensor) for value in (bias, total, product)):
        return False
    is_of_columns = total.dim() == 2 and tuple(bias.shape) == (total.shape[1],) and total.shape == product.shape
    return is_of_columns and bias.dtype == total.dtype == product.dtype and total.is_floating_point()
