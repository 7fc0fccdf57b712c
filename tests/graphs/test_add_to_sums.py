"""A graph that adds its results to given sums returns the sums, and writes over nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autoshard.graphs.add_to_sums import add_to_sums
from autoshard.graphs.owned_results import owned_results
from tests.graphs.test_owned_results import CASES, WHOLE, graph_of


@pytest.mark.parametrize("name", [name for name in CASES if name != "bucket"])
def test_results_are_added_to_sums(name: str) -> None:
    """Three runs return the sum of their results. The first run's results hold the sums if the graph
    owns their memory."""
    graph_module = graph_of(CASES[name][0])
    owned = owned_results(graph_module.graph)
    adding = add_to_sums(graph_module, owned)
    inputs = [torch.rand(WHOLE) for _ in range(3)]
    before = [x.clone() for x in inputs]
    expected = [torch.stack(results).sum(0) for results in zip(*(graph_module(x) for x in inputs), strict=True)]
    first = sums = list(graph_module(inputs[0]))
    for x in inputs[1:]:
        sums = list(adding(x, *sums))
    torch.testing.assert_close(sums, expected)
    assert [now is then for now, then in zip(sums, first, strict=True)] == list(owned)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


def test_each_result_is_added_as_soon_as_it_is_made() -> None:
    """Each result is added to its sum right after the call that makes it, so that it is freed before the next."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    results = [graph.call_function(operator, (x,)) for operator in (torch.neg, torch.exp, torch.sin)]
    graph.output(tuple(results))
    adding = add_to_sums(fx.GraphModule({}, graph), [True, False])
    order = [node.name for node in adding.graph.nodes]
    assert order == ["x", "sum_1", "sum_2", "neg", "exp", "add__tensor", "sin", "add_tensor", "output"]
    assert str(adding.graph.output_node().args[0]) == "(neg, add__tensor, add_tensor)"
