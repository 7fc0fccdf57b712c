"""`with_targets` replaces operators of a graph by other operators."""

from __future__ import annotations

import torch
from torch import fx

from passes.preparation.rewriting import with_targets

_aten = torch.ops.aten


def test_a_graph_without_the_operators_is_left_alone() -> None:
    """A graph without the operators is returned itself. Otherwise a changed copy is returned."""
    graph = fx.Graph()
    graph.output((graph.call_function(_aten.neg.default, (graph.placeholder("x"),)),))
    module = fx.GraphModule(torch.nn.Module(), graph)
    assert with_targets(module, {_aten.tanh.default: _aten.sin.default}) is module
    changed = with_targets(module, {_aten.neg.default: _aten.sin.default})
    assert [node.target for node in changed.graph.find_nodes(op="call_function", target=_aten.sin.default)]
    assert module.graph.find_nodes(op="call_function", target=_aten.neg.default)
