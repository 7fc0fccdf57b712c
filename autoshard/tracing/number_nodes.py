"""Names of nodes that depend only on the calls of a graph and on their order."""

from __future__ import annotations

import re

from torch import fx
from torch.fx.graph import _Namespace

_NUMBER = re.compile(r"_\d+$")


def number_nodes(graph: fx.Graph) -> None:
    """Rename the nodes of a graph in order, so that calls are "mm", "mm_1", "mm_2". Inputs keep their names.

    Two inputs may have one name ("a.b_c" and "a_b.c" both become "p_a_b_c"); the second then gets a number.
    """
    namespace = _Namespace()
    for node in graph.nodes:
        node.name = namespace.create_name(_base_name(node), node)
        if node.op == "placeholder":
            node.target = node.name  # the parameter's name in the generated code
    graph._graph_namespace = namespace


def _base_name(node: fx.Node) -> str:
    match node.op:
        case "call_function":
            return _NUMBER.sub("", node.name)
        case "get_attr" | "placeholder":
            return str(node.target)
        case _:
            return node.name
