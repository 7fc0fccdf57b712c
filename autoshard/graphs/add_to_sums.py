"""Adds the results of a graph to sums, so that micro-batches accumulate gradients while a backward runs.

Before → after: `g = mm(x, y); return (g,)` → `g = mm(x, y); s = add_(sum, g); return (s,)`, where `sum` is a further
placeholder. Each gradient is freed as soon as it is added, so memory has one gradient at a time beside the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autoshard.graphs.copy_nodes import copied
from autoshard.graphs.lazy_module import lazy_module

_aten = torch.ops.aten


def add_to_sums(graph_module: fx.GraphModule, owned: Sequence[bool]) -> fx.GraphModule:
    """Return a copy of a graph whose last results are added to sums. The sums are further inputs, in the same order.

    Args:
        owned: an entry for each of the last results. True: the sum is changed in place and returned, so nothing but the
            caller may use its memory. False: the graph returns the new sum as a new tensor.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> _ = graph.output((x, graph.call_function(torch.ops.aten.exp.default, (x,))))
        >>> adding = add_to_sums(fx.GraphModule({}, graph), [True])
        >>> adding(torch.zeros(2), torch.ones(2))[1]
        tensor([2., 2.])
    """
    return lazy_module(graph_module, adding(graph_module.graph, owned))


def adding(graph: fx.Graph, owned: Sequence[bool]) -> fx.Graph:
    """Return a copy of `graph` whose last results are added to sums. The sums are further inputs, in the same order.

    `owned` has an entry for each of these results: whether its sum is changed in place.
    """
    made, _ = copied(graph.nodes)
    output = made.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    last = [node for node in made.nodes if node.op == "placeholder"][-1:]
    for index, in_place in enumerate(owned, len(results) - len(owned)):
        result = results[index]
        with made.inserting_after(last[0]) if last else made.inserting_before():
            last = [made.placeholder(f"sum_{index}")]
        target = _aten.add_.Tensor if in_place else _aten.add.Tensor
        with made.inserting_after(result if result.op != "placeholder" else last[0]):
            results[index] = made.call_function(target, (last[0], result))
        last[0].meta = {"val": result.meta.get("val")}
        results[index].meta = dict(result.meta)
    output.args = (tuple(results),)
    return made
