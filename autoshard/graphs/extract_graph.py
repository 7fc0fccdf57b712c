"""Extracts a part of a graph as a graph of its own: a phase, half of a backward, or part of an update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import fx

CopyNode = Callable[[fx.Graph, fx.Node, Callable[[fx.Node], fx.Node]], fx.Node]


def placeholder_like(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Add a placeholder with the name and the metadata of a node.

    `graph.placeholder` writes names in small letters, and names of parameters may have capitals.
    """
    made = graph.create_node("placeholder", node.name, name=node.name)
    made.meta = dict(node.meta)
    return made


def extract_graph(
    whole: fx.Graph,
    inputs: Sequence[fx.Node],
    members: Collection[fx.Node],
    results: Sequence[fx.Node],
    copy_node: CopyNode = fx.Graph.node_copy,
) -> fx.Graph:
    """Return the graph of some calls of `whole`, from `inputs` to `results`.

    Other nodes that the calls need (scalars, constants) are copied too.

    Args:
        whole: the whole graph.
        inputs: its nodes to turn into placeholders, in order.
        members: its calls to copy.
        results: its nodes to return, in order.
        copy_node: copies a node into a graph, given the copy of each operand.
    """
    graph = fx.Graph()
    copies = {node: placeholder_like(graph, node) for node in inputs}

    def copy(node: fx.Node) -> None:
        if node not in copies:
            for operand in node.all_input_nodes:
                copy(operand)
            copies[node] = copy_node(graph, node, copies.__getitem__)

    for node in whole.nodes:
        if node in members and node.op not in ("placeholder", "output"):
            copy(node)
    graph.output(tuple(copies[node] for node in results))
    graph.eliminate_dead_code()
    return graph
