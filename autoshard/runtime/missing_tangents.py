"""Rewrite a backward so that outputs without a gradient contribute nothing, as on one device.

The pass removes the values that depend only on missing tangents (gradients of outputs). Zero tangents in their place
would be wrong, because zero times an infinite derivative is NaN.

Before → after, without the tangent of `aux`: `add(mm(tangent_main, a), mm(tangent_aux, b))` →
`add(mm(tangent_main, a), zeros)`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from autoshard.graphs.copy_nodes import copy_node

_full = torch.ops.aten.full.default


def without_tangents(
    root: fx.GraphModule, tangents: Collection[int], missing: Collection[int], device: torch.device
) -> fx.GraphModule:
    """Return a copy of a backward graph that has the same inputs, but does not read the missing tangents.

    Args:
        root: a functional graph of local values, linear in its tangents.
        tangents: positions of all tangents among the graph's inputs.
        missing: positions of the missing tangents.
        device: device of the zeros that the new graph needs.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    after_tangent, absent = set[fx.Node](), set[fx.Node]()
    inputs = [node for node in root.graph.nodes if node.op == "placeholder"]
    after_tangent.update(inputs[place] for place in tangents)
    absent.update(inputs[place] for place in missing)

    def value(node: fx.Node) -> fx.Node:
        return _zeros(graph, node, device) if node in absent else copies[node]

    for node in root.graph.nodes:
        flowing = [operand for operand in node.all_input_nodes if operand in after_tangent]
        if flowing and node.op != "output":
            after_tangent.add(node)
            if absent.issuperset(flowing):
                absent.add(node)
                continue
        copies[node] = copy_node(graph, node, value)
    graph.eliminate_dead_code()
    return fx.GraphModule(root, graph)


def _zeros(graph: fx.Graph, node: fx.Node, device: torch.device) -> fx.Node:
    like = node.meta["val"]
    made = graph.call_function(_full, (list(like.shape), 0), {"dtype": like.dtype, "device": device})
    made.meta = dict(node.meta)
    return made
