"""Views of views are removed if they make and move no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autoshard.graphs.fold_views import fold_views

reshape, transpose, permute = torch.ops.aten.reshape.default, torch.ops.aten.t.default, torch.ops.aten.permute.default


def graph_of(*calls: tuple[Any, ...], returned: int = -1) -> fx.GraphModule:
    """A chain of calls on [4, 6]. The graph returns the call number `returned` and the last call."""
    graph = fx.Graph()
    value, fake = graph.placeholder("x"), torch.empty(4, 6, device="meta")
    value.meta["val"] = fake
    made = [value]
    for target, *rest in calls:
        value, fake = graph.call_function(target, (value, *rest)), target(fake, *rest)
        value.meta["val"] = fake
        made.append(value)
    graph.output((made[returned], made[-1]))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(
    ("calls", "left"),
    [
        (((reshape, [24]), (reshape, [6, 4])), 1),
        (((reshape, [24]), (reshape, [4, 6]), (reshape, [2, 12])), 1),
        (((transpose,), (reshape, [24]), (reshape, [4, 6])), 3),
        (((permute, [0, 1]), (reshape, [24])), 1),
        (((permute, [1, 0]), (reshape, [24])), 2),
        (((reshape, [24]), (reshape, [4, 6])), 1),
    ],
)
def test_how_many_calls_are_left(calls: tuple[tuple[Any, ...], ...], left: int) -> None:
    """Results do not change, a reshape that copies stays, and no result is the input itself."""
    graph_module = graph_of(*calls)
    x = torch.randn(4, 6)
    expected = graph_module(x)
    fold_views(graph_module)
    found = graph_module(x)
    assert (
        len(graph_module.graph.find_nodes(op="call_function", target=reshape))
        + len([node for node in graph_module.graph.nodes if node.target in (transpose, permute)])
        == left
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert found[0] is not x


def test_what_else_reads_stays() -> None:
    """A view that the graph returns is not removed."""
    graph_module = graph_of((reshape, [24]), (reshape, [6, 4]), returned=1)
    fold_views(graph_module)
    assert len(graph_module.graph.find_nodes(op="call_function", target=reshape)) == 2
