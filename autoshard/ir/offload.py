"""Values of a program that wait in host memory between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir.restored_nodes import RestoredNode

LABEL = "offload"
"""Key in `Prediction.breakdown` for the time of copies to and from the host."""


@dataclass(frozen=True, slots=True)
class OffloadedNode(RestoredNode):
    """A forward node whose value moves to the host at once, and returns just before the backward's node `before`."""


@dataclass(frozen=True, slots=True)
class Offload:
    """The offloaded nodes of a plan in program order, with their effect on each rank.

    Args:
        candidates: number of nodes that the search could have offloaded.
        host_bytes: bytes in host memory at the end of the forward.
        saved_bytes: bytes by which offload lowers the peak of device memory, all else equal.
        time_s: seconds per step that the copies add to the objective.
    """

    nodes: tuple[OffloadedNode, ...] = ()
    candidates: int = 0
    host_bytes: int = 0
    saved_bytes: int = 0
    time_s: float = 0.0


NO_OFFLOAD = Offload()
"""No offload: every saved value stays on the device."""
