"""Verifies that offloaded values are on the host or on the device where their readers expect them.

In value numbering (`passes.preparation.number_values`) a copy to the host or back equals its operand. So other proofs
show that a fetched value is right, but not where it is.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autoshard.errors import VerificationError
from autoshard.kernels.offload import from_host, to_host


def verify_offload(graph: fx.Graph, held: Collection[fx.Node] = (), kept: Collection[fx.Node] = ()) -> None:
    """Check that only fetches read values on the host, and that fetched values are on the host.

    A fetch is a copy from the host to the device.

    Args:
        held: placeholders whose values are on the host.
        kept: results that the graph may return on the host.

    Raises:
        VerificationError: a call other than a fetch reads a value on the host, or a fetched value is not on the host.
    """
    for node in graph.nodes:
        if node.target is to_host or node in held:
            for reader in node.users:
                if reader.target is not from_host and not (reader.op == "output" and node in kept):
                    raise VerificationError(f"{reader.format_node()} reads {node.name!r}, which lies on the host.")
        elif node.target is from_host and node.args[0] not in held and node.args[0].target is not to_host:
            raise VerificationError(f"{node.format_node()} fetches {node.args[0]!s}, which does not lie on the host.")
