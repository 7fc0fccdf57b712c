"""Joins the sums of squares behind a gradient norm to one call, because every call costs time on the host.

Before → after: `sum_of_squares(x) + sum_of_squares(y) + z` → `sum_of_all_squares([x, y]) + z`. The squares are then
added in another order. The pass serves graphs that run as they are, without a compiler such as Inductor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

_ADD = torch.ops.aten.add.Tensor


def join_squares(graph_module: fx.GraphModule) -> None:
    """Join sums of squares in the given graph module itself."""
    graph = graph_module.graph
    for root in [node for node in graph.nodes if _is_sum(node) and not _is_addend(node)]:
        addends = list(_addends(root))
        squares = [addend for addend in addends if _is_squares(addend)]
        if len(squares) < 2:
            continue
        with graph.inserting_before(root):
            operands = [square.args[0] for square in squares]
            total = graph.call_function(torch.ops.autoshard.sum_of_all_squares.default, (operands,))
            for addend in addends:
                if not _is_squares(addend):
                    total = graph.call_function(_ADD, (total, addend))
        total.meta = dict(root.meta)
        root.replace_all_uses_with(total)
        _erase(graph, root)
    graph_module.recompile()


def _addends(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the addends of a sum, in order.

    An addend that is a sum itself, and that nothing else reads, is replaced by its own addends.
    """
    waiting = node.all_input_nodes[::-1]
    while waiting:
        operand = waiting.pop()
        if _is_sum(operand) and len(operand.users) == 1:
            waiting += operand.all_input_nodes[::-1]
        else:
            yield operand


def _erase(graph: fx.Graph, root: fx.Node) -> None:
    """Erase `root`, which has no users.

    Operands that are sums or sums of squares, and that have no users left, are erased in the same way.
    """
    waiting = [root]
    while waiting:
        node = waiting.pop()
        operands = node.all_input_nodes
        graph.erase_node(node)
        waiting += [each for each in operands if not each.users and (_is_sum(each) or _is_squares(each))]


def _is_sum(node: fx.Node) -> bool:
    return node.target is _ADD and len(node.all_input_nodes) == 2 and not node.kwargs and _is_scalar(node)


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _is_addend(node: fx.Node) -> bool:
    return len(node.users) == 1 and all(map(_is_sum, node.users))


def _is_squares(node: fx.Node) -> bool:
    return str(node.target) == "autoshard.sum_of_squares.default" and len(node.users) <= 1
