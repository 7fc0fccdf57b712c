"""Removes redundant views, because every call costs time on the host.

Before → after: `reshape(reshape(x, a), b)` → `reshape(x, b)`, if nothing else reads the inner result. `reshape(x, b)`
and `permute(x, dims)` → `x`, if they change nothing. Lowered programs have two reshapes around each linear layer. Only
views of contiguous tensors are removed. A reshape that copies stays, so memory is allocated when the plan expects it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_RESHAPES = (torch.ops.aten.reshape.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_PERMUTE = torch.ops.aten.permute.default


def fold_views(graph_module: fx.GraphModule) -> None:
    """Remove redundant views from the given graph module itself."""
    graph = graph_module.graph
    results = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        if node.target in _RESHAPES:
            inner: Any = node.args[0]
            if inner.target in _RESHAPES and len(inner.users) == 1 and _is_in_order(inner.args[0]):
                node.replace_input_with(inner, inner.args[0])
                graph.erase_node(inner)
        if node not in results and _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph_module.recompile()


def _changes_nothing(node: fx.Node) -> bool:
    """Whether `node` is a view with the same shape and the same order of dims as its contiguous operand."""
    operand, value = node.args[0] if node.args else None, node.meta.get("val")
    if not isinstance(operand, fx.Node) or not _is_in_order(operand):
        return False
    if node.target is _PERMUTE:
        return [*node.args[1]] == [*range(operand.meta["val"].dim())]  # type: ignore[misc]
    return node.target in _RESHAPES and isinstance(value, torch.Tensor) and value.shape == operand.meta["val"].shape


def _is_in_order(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_contiguous()
