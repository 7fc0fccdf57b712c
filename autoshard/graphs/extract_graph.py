"""Finds the calls that compute a value, and copies some calls of a graph into a graph of their own."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence

from torch import fx

from autoshard.graphs.copy_nodes import copy_node


def needed(results: Iterable[fx.Node], given: Container[fx.Node] = ()) -> set[fx.Node]:
    """Return `results` and all nodes from which they are computed.

    The operands of nodes in `given` are not followed.
    """
    found, waiting = set[fx.Node](), list(results)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += () if node in given else node.all_input_nodes
    return found


def placeholder_like(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Add a placeholder with `node`'s name and metadata; `fx.Graph.placeholder` would lower the name's capitals."""
    made = graph.create_node("placeholder", node.name, name=node.name)
    made.meta = dict(node.meta)
    return made


def extract_graph(
    whole: fx.Graph,
    inputs: Sequence[fx.Node],
    calls: Collection[fx.Node],
    results: Sequence[fx.Node],
) -> fx.Graph:
    """Return a new graph that computes `results` from `inputs` with copies of `calls`, all of them nodes of `whole`.

    `inputs` become the placeholders, in order. Scalars, constants and other nodes that the calls read are copied too.
    Unused calls are left out.
    """
    graph = fx.Graph()
    copies = {node: placeholder_like(graph, node) for node in inputs}

    def copy(node: fx.Node) -> None:
        if node not in copies:
            for operand in node.all_input_nodes:
                copy(operand)
            copies[node] = copy_node(graph, node, copies.__getitem__)

    for node in whole.nodes:
        if node in calls and node.op not in ("placeholder", "output"):
            copy(node)
    graph.output(tuple(copies[node] for node in results))
    graph.eliminate_dead_code()
    return graph
