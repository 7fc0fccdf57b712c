"""Compute the bytes that recomputation and offload save, and the seconds that they cost."""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir.offload import NO_OFFLOAD, Offload
from autoshard.ir.recompute import NO_RECOMPUTE, Recompute
from passes.planning.build_assignment import PlanningProblem
from passes.recomputation.fitting import JointSolution, PeakOf
from passes.recomputation.recompute_problem import Restored
from passes.recomputation.with_restored import with_restored


def savings_of(planning: PlanningProblem, found: JointSolution, peak_of: PeakOf) -> tuple[Recompute, Offload]:
    """Return the recomputation and the offload of a solution, with the bytes saved and the seconds added.

    The savings of recomputation are against a program that only offloads. The savings of offload are against a program
    that only recomputes.
    """
    choice, restored = found.solution.choice, found.restored

    def without(left: Restored) -> tuple[int, float]:
        """Return the saved peak bytes and the added seconds, against a program that restores only the nodes `left`."""
        other = with_restored(planning, left)
        peaks = [int(peak_of(item, choice)) for item in (other, found.planning)]
        costs = [item.assignment.cost_of(choice) for item in (other, found.planning)]
        return peaks[0] - peaks[1], costs[1] - costs[0]

    recompute, offload = NO_RECOMPUTE, NO_OFFLOAD
    if restored.recomputed:
        recompute = Recompute(restored.recomputed, found.recomputable, *without(replace(restored, recomputed=())))
    if restored.offloaded:
        host = int(found.host_bytes)
        offload = Offload(restored.offloaded, found.offloadable, host, *without(replace(restored, offloaded=())))
    return recompute, offload
