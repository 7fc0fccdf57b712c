"""Cuts a graph in two. The first graph computes some of the results; the second computes the other results.

The second graph takes values that the first graph computed.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from autoshard.graphs.extract_graph import extract_graph, needed
from autoshard.ir.collectives import is_wait


def cut_graph(
    root: fx.GraphModule, results: Collection[int], *, hands_on: int = 0
) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """Return the first graph, the second graph, and the number of values that the first hands to the second.

    The first graph takes all inputs of `root`. It returns the results at the indices `results`, then the values that it
    hands over. The second graph takes the values handed over, then inputs of `root`. It returns the other results.
    A collective's wait is in the graph that starts the collective.

    Args:
        root: a functional graph that returns a flat tuple.
        results: indices of the first graph's results among those of `root`, in order.
        hands_on: number of first inputs of `root` that the second graph does not take. If the second graph reads such
            an input, the first graph hands the input over.

    Example:
        >>> graph = fx.Graph()
        >>> x, y = graph.placeholder("x"), graph.placeholder("y")
        >>> total = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
        >>> total.meta["val"] = torch.ones(2)
        >>> _ = graph.output((total, graph.call_function(torch.ops.aten.mul.Tensor, (total, y))))
        >>> first, second, _ = cut_graph(fx.GraphModule({}, graph), (0,), hands_on=2)
        >>> [node.name for node in second.graph.nodes]
        ['y', 'add_tensor', 'mul_tensor', 'output']
    """
    nodes = list(root.graph.nodes)
    returned: Sequence[fx.Node] = nodes[-1].args[0]
    firsts = [returned[index] for index in results]
    others = [result for index, result in enumerate(returned) if index not in results]
    chosen = _chosen(nodes, firsts)
    rest = [node for node in nodes[:-1] if node.op != "placeholder" and node not in chosen]
    read = {operand for node in rest for operand in node.all_input_nodes} | set(others)
    inputs = [node for node in nodes if node.op == "placeholder"]
    handed_on = set(inputs[:hands_on])
    kept = [node for node in nodes if node in read and (node in handed_on or (node in chosen and _is_tensor(node)))]
    first = extract_graph(root.graph, inputs, chosen, [*firsts, *kept])
    second = extract_graph(root.graph, [*kept, *inputs[hands_on:]], set(rest), others)
    return fx.GraphModule(root, first), fx.GraphModule(root, second), len(kept)


def _chosen(nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the calls that compute `results`.

    All `getitem` nodes and waits of these calls belong to them, even if no result reads them.
    """
    chosen = {node for node in needed(results) if node.op != "placeholder"}
    for node in nodes:
        if (node.target is operator.getitem or is_wait(node)) and node.all_input_nodes[0] in chosen:
            chosen.add(node)
    return chosen


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) and node.op != "get_attr"
