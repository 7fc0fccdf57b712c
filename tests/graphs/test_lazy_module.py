"""A lazy graph module writes its code at its first run, and the code is that of a graph module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn

from autoshard.graphs.lazy_module import lazy_module


def _doubled() -> fx.Graph:
    """A graph that scales its input by an attribute of the root."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.mul, (x, graph.get_attr("scale"))))
    return graph


def _root() -> nn.Module:
    root = nn.Module()
    root.register_buffer("scale", torch.tensor(2.0))
    return root


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """A list to which each graph is added when its code is written."""
    graphs: list[fx.Graph] = []
    write = fx.Graph.python_code

    def note(self: fx.Graph, *args: object, **named: object) -> object:
        graphs.append(self)
        return write(self, *args, **named)

    monkeypatch.setattr(fx.Graph, "python_code", note)
    return graphs


def test_code_is_written_once_when_it_is_run(written: list[fx.Graph]) -> None:
    """Code is written once at the first run, and not when a module is made or copied."""
    module = lazy_module(lazy_module(_root(), _doubled()), _doubled())
    assert written == []
    assert module(torch.tensor(3.0)).item() == module(torch.tensor(3.0)).item() == 6.0
    assert written == [module.graph]


def test_code_and_copies_are_those_of_a_graph_module(written: list[fx.Graph]) -> None:
    """A lazy module has the code of a graph module, and its deep copy runs."""
    module = lazy_module(_root(), _doubled())
    assert copy.deepcopy(module)(torch.tensor(3.0)).item() == 6.0
    assert module.code == fx.GraphModule(_root(), _doubled()).code


def test_a_change_is_seen() -> None:
    """After a change of the graph and `recompile`, a lazy module runs the changed graph."""
    module = lazy_module(_root(), _doubled())
    module(torch.tensor(3.0))
    call = next(node for node in module.graph.nodes if node.op == "call_function")
    call.target = torch.add
    module.recompile()
    assert module(torch.tensor(3.0)).item() == 5.0
