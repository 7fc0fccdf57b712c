"""What of a program is computed again in the backward instead of being kept for it."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir.brought_back import BroughtBack

PHASE = "recompute"
"""The phase of nodes that compute a value of the forward once more, for the backward; they run within the backward."""


@dataclass(frozen=True, slots=True)
class RecomputedNode(BroughtBack):
    """A node of the forward that is run again; `before` says just before which node of the backward."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """The nodes of a plan that are recomputed, in program order, and what that does.

    Args:
        nodes: the nodes.
        candidates: how many nodes the search might have recomputed.
        saved_bytes: by how much the peak would be larger without, all specs alike, on each rank.
        time_s: what it adds to the objective, seconds.
    """

    nodes: tuple[RecomputedNode, ...] = ()
    candidates: int = 0
    saved_bytes: int = 0
    time_s: float = 0.0


NO_RECOMPUTE = Recompute()
"""Everything that the backward reads is kept."""
