"""`NodeTime`, the predicted times by which lowering orders nodes."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autoshard.ir.mesh import Mesh
from passes.lowering.node_time import NodeTime

_aten = torch.ops.aten


def test_what_moves_nothing_takes_no_time() -> None:
    """Views and items of tuples take no time.

    Without a cluster, the time of another call is its bytes read and written.
    """
    graph, value = fx.Graph(), torch.empty(4, 2, device="meta")
    x = graph.placeholder("x")
    free = [
        graph.call_function(operator.getitem, (x, 0)),
        graph.call_function(_aten.t.default, (x,)),
        graph.call_function(_aten.alias.default, (x,)),
    ]
    negated = graph.call_function(_aten.neg.default, (x,))
    for node in graph.nodes:
        node.meta["val"] = value
    time = NodeTime(Mesh({"data": 2}), None)
    assert [time(node) for node in free] == [0.0, 0.0, 0.0]
    assert time(negated) == 2 * 32
