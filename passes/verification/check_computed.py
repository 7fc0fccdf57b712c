"""Checks that a graph computes each value before its readers, because rewrites that go node by node rely on this."""

from __future__ import annotations

from torch import fx

from autoshard.errors import VerificationError


def check_computed(graph: fx.Graph) -> None:
    """Raise `VerificationError` if a node of a graph reads a value before it is computed."""
    computed: set[fx.Node] = set()
    for node in graph.nodes:
        missing = [operand for operand in node.all_input_nodes if operand not in computed]
        if missing:
            raise VerificationError(f"{node.format_node()} reads {missing[0].name!r} before it is computed.")
        computed.add(node)
