"""Values of a program that the backward recomputes instead of reading saved copies."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir.restored_nodes import RestoredNode

PHASE = "recompute"
"""Name of the phase of recomputed nodes. They run within the backward."""


@dataclass(frozen=True, slots=True)
class RecomputedNode(RestoredNode):
    """A forward node that runs a second time, just before the backward's node `before`."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """The recomputed nodes of a plan in program order, with their effect on each rank.

    Args:
        candidates: number of nodes that the search could have recomputed.
        saved_bytes: bytes by which recomputation lowers the peak of device memory, with the same specs.
        time_s: seconds per step that recomputation adds to the objective.
    """

    nodes: tuple[RecomputedNode, ...] = ()
    candidates: int = 0
    saved_bytes: int = 0
    time_s: float = 0.0


NO_RECOMPUTE = Recompute()
"""No recomputation: everything that the backward reads is saved."""
