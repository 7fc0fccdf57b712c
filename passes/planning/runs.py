"""The number of runs of calls and reshards in a step: once for each left-out block, and once for each micro-batch.

The update and its reshards run once. All other calls run in each micro-batch, even calls on parameters alone. Such
calls may be hoisted if memory allows (`passes.lowering.hoist`), but their price does not assume that.
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
    """How often the reshard on each link runs, in the order of links."""
    counts = repeated.link_counts()
    phases = (_phase_of(space, link) for link in space.links)
    return [counts.get(index, 1) * _runs(phase, micro_batches) for index, phase in enumerate(phases)]


def _phase_of(space: SearchSpace, link: Link) -> str:
    """The phase of a link's reshard: the phase of its reader or, for a result of the program, of its maker."""
    head = space.sites[link.head]
    return space.sites[link.tail].phase if leaves_program(head, link) else head.phase


def _runs(phase: str, micro_batches: int) -> int:
    return 1 if phase == UPDATE else micro_batches
