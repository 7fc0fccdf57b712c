"""Names of nodes that depend only on the calls of a graph and on their order."""

from __future__ import annotations

import re

from torch import fx
from torch.fx.graph import _Namespace

_NUMBER = re.compile(r"_\d+$")


def number_nodes(graph: fx.Graph) -> None:
    """Rename the nodes of a graph in order, so that calls are "mm", "mm_1", "mm_2". Inputs keep their names."""
    namespace = _Namespace()
    for node in graph.nodes:
        node.name = namespace.create_name(_base_name(node), node)
    graph._graph_namespace = namespace


def _base_name(node: fx.Node) -> str:
    match node.op:
        case "call_function":
            return _NUMBER.sub("", node.name)
        case "get_attr" | "placeholder":
            return str(node.target)
        case _:
            return node.name
