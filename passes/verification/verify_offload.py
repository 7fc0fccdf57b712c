"""Verify that what lies in the host's memory is only fetched from there.

Value numbering takes copies to the host and back for their operand (`number_values`), so that the proof of a
program says what a fetched value is. Where it lies is left to show: a call on an accelerator cannot read the host's
memory, and what never went there cannot come back.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autoshard.errors import VerificationError
from autoshard.kernels.offload import from_host, to_host


def verify_offload(graph: fx.Graph, held: Collection[fx.Node] = (), kept: Collection[fx.Node] = ()) -> None:
    """Check each copy to and from the host of a program.

    Args:
        graph: of the program.
        held: inputs that lie on the host.
        kept: results that the program may leave there.

    Raises:
        VerificationError: something else reads a value on the host, or something else is fetched from there.
    """
    for node in graph.nodes:
        if node.target is to_host or node in held:
            for reader in node.users:
                if reader.target is not from_host and not (reader.op == "output" and node in kept):
                    raise VerificationError(f"{reader.format_node()} reads {node.name!r}, which lies on the host.")
        elif node.target is from_host and node.args[0] not in held and node.args[0].target is not to_host:
            raise VerificationError(f"{node.format_node()} fetches {node.args[0]!s}, which does not lie on the host.")
