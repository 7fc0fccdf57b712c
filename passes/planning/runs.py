"""How often calls and reshards run in a step of the whole program: for each block left out, and for each micro-batch.

The update, and reshards of what it reads or gives, run once. Micro-batches run all else, also what depends on
parameters alone: that it is hoisted where memory allows (`passes.lowering.hoist`) is no part of the price.
"""

from __future__ import annotations

from passes.memory.liveness import UPDATE
from passes.strategies.enumerate_strategies import Link, SearchSpace, leaves_program
from passes.strategies.repeated import RepeatedUnits


def site_runs(space: SearchSpace, repeated: RepeatedUnits, micro_batches: int) -> dict[str, int]:
    """Site to how often it runs."""
    counts = repeated.site_counts()
    return {name: counts.get(name, 1) * _runs(site.phase, micro_batches) for name, site in space.sites.items()}


def link_runs(space: SearchSpace, repeated: RepeatedUnits, micro_batches: int) -> list[int]:
    """How often the reshard on each link runs, in the order of links."""
    counts = repeated.link_counts()
    phases = (_phase_of(space, link) for link in space.links)
    return [counts.get(index, 1) * _runs(phase, micro_batches) for index, phase in enumerate(phases)]


def _phase_of(space: SearchSpace, link: Link) -> str:
    """The phase in which a link's reshard runs: that of its reader, or of what leaves the program."""
    head = space.sites[link.head]
    return space.sites[link.tail].phase if leaves_program(head, link) else head.phase


def _runs(phase: str, micro_batches: int) -> int:
    return 1 if phase == UPDATE else micro_batches
