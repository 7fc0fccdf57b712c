"""Count how often each call and each reshard runs in a step of the whole model.

Calls of left-out blocks are counted with the calls that stand for them. The update runs once, with the reshards of its
operands and results. Everything else runs in each micro-batch, even calls on parameters alone, which lowering may later
hoist out of the micro-batches (`passes.lowering.hoist`).
"""

from __future__ import annotations

from passes.memory.liveness import UPDATE
from passes.strategies.enumerate_strategies import Link, SearchSpace, leaves_program
from passes.strategies.repeated import RepeatedUnits


def site_runs(space: SearchSpace, repeated: RepeatedUnits, micro_batches: int) -> dict[str, int]:
    """Return the number of runs of each site in a step of the whole model, by the site's name."""
    counts = repeated.site_counts()
    return {name: counts.get(name, 1) * _runs(site.phase, micro_batches) for name, site in space.sites.items()}


def link_runs(space: SearchSpace, repeated: RepeatedUnits, micro_batches: int) -> list[int]:
    """Return the number of runs of each link's reshard in a step of the whole model, in the order of `space.links`."""
    counts = repeated.link_counts()
    phases = (_phase_of(space, link) for link in space.links)
    return [counts.get(index, 1) * _runs(phase, micro_batches) for index, phase in enumerate(phases)]


def _phase_of(space: SearchSpace, link: Link) -> str:
    """Return the phase in which the reshard on a link runs: the phase of the link's head.

    If the value leaves the program, the phase of the tail is returned.
    """
    head = space.sites[link.head]
    return space.sites[link.tail].phase if leaves_program(head, link) else head.phase


def _runs(phase: str, micro_batches: int) -> int:
    return 1 if phase == UPDATE else micro_batches
