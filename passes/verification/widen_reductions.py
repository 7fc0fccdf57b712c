"""Replaces reductions of gradients in 16 bits by reductions in float32, so that phases can be compared.

It inverts `passes.lowering.narrow_reductions`. Before → after: `_to_copy(wait(all_reduce(_to_copy(x, bf16), "sum",
"data/narrow_gradients")), float32)` → `wait(all_reduce(x, "sum", "data"))`. The user requested the rounding to 16 bits.
The comparison shows that nothing else changes the value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.errors import VerificationError
from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.communicators import Purpose, without_purpose

_TO_COPY = torch.ops.aten._to_copy.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def widen_reductions(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph with float32 reductions of gradients in place of reductions in 16 bits.

    If the graph has no reduction in 16 bits, the graph itself is returned.

    Raises:
        VerificationError: the operand of a reduction in 16 bits is not rounded from float32, or its result is not
            converted back.
    """
    starts = [node for node in graph_module.graph.nodes if _is_narrow(node)]
    if not starts:
        return graph_module
    wide = {_widened(start): start for start in starts}
    inner = {node for start in starts for node in (start.args[0], start, *start.users)}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        if node in wide:
            start: Any = wide[node]
            group = without_purpose(str(start.args[-1]))
            operands = (copies[start.args[0].args[0]], *start.args[1:-1], group)
            copies[node] = graph.call_function(_WAIT, (graph.call_function(start.target, operands),))
            copies[node].meta = dict(node.meta)
        elif node not in inner:
            copies[node] = copy_node(graph, node, copies.__getitem__)
    return lazy_module(graph_module, graph)


def _is_narrow(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and len(node.args) > 1
        and isinstance(node.args[-1], str)
        and node.args[-1].endswith(f"/{Purpose.NARROW_GRADIENTS}")
    )


def _widened(start: fx.Node) -> fx.Node:
    """Return the node that converts the result of a 16-bit reduction back to float32.

    Raises:
        VerificationError: the nodes around the reduction `start` do not have the form that the module's docstring
            shows.
    """
    narrow: Any = start.args[0]
    waits: list[Any] = list(start.users)
    results = [user for wait in waits for user in wait.users]
    if len(waits) != 1 or waits[0].target is not _WAIT or len(results) != 1 or start.args[1] != "sum":
        raise VerificationError(f"{start.format_node()} is no sum that is waited for once, and read once.")
    for node in (narrow, results[0]):
        if node.target is not _TO_COPY or set(node.kwargs) != {"dtype"} or (node is narrow and len(node.users) != 1):
            raise VerificationError(f"{start.format_node()} is of 16 bits, and {node.format_node()} does not round it.")
    value, result = narrow.args[0].meta["val"], results[0]
    if value.dtype is not torch.float32 or result.kwargs["dtype"] is not torch.float32:
        raise VerificationError(
            f"{start.format_node()} adds up {value.dtype} and gives {result.kwargs['dtype']}; both are to be float32."
        )
    return result
