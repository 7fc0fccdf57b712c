"""Values of a program in host memory between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir.restored_nodes import RestoredNode

LABEL = "offload"
"""Key in `Prediction.breakdown` for the time of copies to and from the host."""


@dataclass(frozen=True, slots=True)
class OffloadedNode(RestoredNode):
    """A node of the forward whose value moves to the host at once and returns before node `before`."""


@dataclass(frozen=True, slots=True)
class Offload:
    """The offloaded nodes of a plan in program order, with their effect.

    Args:
        nodes: the offloaded nodes.
        candidates: number of nodes that the search could have offloaded.
        host_bytes: bytes in host memory at the end of the forward, for each rank.
        saved_bytes: bytes by which offload lowers the peak of each rank, all else equal.
        time_s: seconds that the copies add to the objective.
    """

    nodes: tuple[OffloadedNode, ...] = ()
    candidates: int = 0
    host_bytes: int = 0
    saved_bytes: int = 0
    time_s: float = 0.0


NO_OFFLOAD = Offload()
"""No offload: every saved value stays on the device."""
