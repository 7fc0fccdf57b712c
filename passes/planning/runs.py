"""Number of runs of calls and reshards in a step of the whole program, counting left-out blocks and micro-batches.

The update runs once, with the reshards of its operands and results. Everything else runs in each micro-batch. This
includes calls that depend on parameters alone: the price ignores that lowering may hoist them
(`passes.lowering.hoist`).
"""

from __future__ import annotations

from passes.memory.liveness import UPDATE
from passes.strategies.enumerate_strategies import Link, SearchSpace, leaves_program
from passes.strategies.repeated import RepeatedUnits


def site_runs(space: SearchSpace, repeated: RepeatedUnits, micro_batches: int) -> dict[str, int]:
    """Site to its number of runs."""
    counts = repeated.site_counts()
    return {name: counts.get(name, 1) * _runs(site.phase, micro_batches) for name, site in space.sites.items()}


def link_runs(space: SearchSpace, repeated: RepeatedUnits, micro_batches: int) -> list[int]:
    """Number of runs of the reshard on each link, in the order of links."""
    counts = repeated.link_counts()
    phases = (_phase_of(space, link) for link in space.links)
    return [counts.get(index, 1) * _runs(phase, micro_batches) for index, phase in enumerate(phases)]


def _phase_of(space: SearchSpace, link: Link) -> str:
    """Return the phase of a link's reshard: the phase of its reader, or of its maker if the value leaves the
    program.
    """
    head = space.sites[link.head]
    return space.sites[link.tail].phase if leaves_program(head, link) else head.phase


def _runs(phase: str, micro_batches: int) -> int:
    return 1 if phase == UPDATE else micro_batches
