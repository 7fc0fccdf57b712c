"""What of a program lies in the host's memory between the forward and the backward."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir.brought_back import BroughtBack

LABEL = "offload"
"""What the time of copies to and from the host counts as in a prediction's breakdown."""


@dataclass(frozen=True, slots=True)
class OffloadedNode(BroughtBack):
    """A node of the forward whose value goes to the host when it is made; `before` says when it comes back."""


@dataclass(frozen=True, slots=True)
class Offload:
    """The nodes of a plan that are offloaded, in program order, and what that does.

    Args:
        nodes: the nodes.
        candidates: how many nodes the search might have offloaded.
        host_bytes: what lies in the host's memory at the end of the forward, for each rank.
        saved_bytes: by how much the peak would be larger without, all else alike, on each rank.
        time_s: what the copies add to the objective, seconds.
    """

    nodes: tuple[OffloadedNode, ...] = ()
    candidates: int = 0
    host_bytes: int = 0
    saved_bytes: int = 0
    time_s: float = 0.0


NO_OFFLOAD = Offload()
"""Nothing leaves the device."""
