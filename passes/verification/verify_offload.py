"""Verifies the places of values in host memory.

Value numbering treats copies to the host and back as their operand (`number_values`), so a program's proof covers the
fetched value. Its place remains to be shown. A call on an accelerator cannot read host memory, and only values on the
host can be fetched.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autoshard.errors import VerificationError
from autoshard.kernels.offload import from_host, to_host


def verify_offload(graph: fx.Graph, held: Collection[fx.Node] = (), kept: Collection[fx.Node] = ()) -> None:
    """Check each copy to and from the host in a program.

    Args:
        graph: graph of the program.
        held: inputs on the host.
        kept: results that the program may leave there.

    Raises:
        VerificationError: another call reads a value on the host, or a value that is not there is fetched.
    """
    for node in graph.nodes:
        if node.target is to_host or node in held:
            for reader in node.users:
                if reader.target is not from_host and not (reader.op == "output" and node in kept):
                    raise VerificationError(f"{reader.format_node()} reads {node.name!r}, which lies on the host.")
        elif node.target is from_host and node.args[0] not in held and node.args[0].target is not to_host:
            raise VerificationError(f"{node.format_node()} fetches {node.args[0]!s}, which does not lie on the host.")
