"""What is in memory when under one choice, to the byte: what a plan is said to take.

A search bounds memory by tables over pairs of variables (`liveness`). Here everything is decided. At the same points:

1. Inputs, reshards and calls make storages, or give views of those that they read (`Walk`).
2. A storage is there from its making to its last use, views of it included; what is handed out stays to the end.
3. What a reshard or a call needs for a moment is found by emitting it (`transients`), less what goes meanwhile.
4. What elided units hold is there when `elided_lifetimes` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from passes.memory.elided_lifetimes import elided_intervals
from passes.memory.liveness import Interval
from passes.planning.build_assignment import PlanningProblem
from passes.planning.storage_walk import Walk, walk_through
from passes.solver.assignment import Floats

PARTS = ("parameters", "optimizer state", "gradients", "inputs", "activations")


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Bytes in memory over an interval, by what they are; negative where something that is counted goes early."""

    part: str
    interval: Interval
    size: float
    number: int = 1


@dataclass(frozen=True, slots=True)
class ExactMemory:
    """All that is in memory at some of `points` points."""

    points: int
    stored: tuple[StoredBytes, ...]

    def used(self) -> Floats:
        """Bytes in use on each rank at every point, [points]."""
        change = np.zeros(self.points + 1)
        for item in self.stored:
            change[item.interval.birth] += item.size * item.number
            change[item.interval.death + 1] -= item.size * item.number
        return np.asarray(np.cumsum(change)[:-1], dtype=np.float64)

    def at(self, point: int) -> dict[str, float]:
        """Bytes in use at a point, by what they are."""
        parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for item in self.stored:
            if point in item.interval:
                parts[item.part] += item.size * item.number
        return parts


def exact_memory(planning: PlanningProblem, choice: Sequence[int]) -> ExactMemory:
    """What is in memory under a choice of one option per variable."""
    walk = walk_through(planning, choice)
    return ExactMemory(planning.liveness.points, tuple(_stored(planning, walk)))


def exact_peak(planning: PlanningProblem, choice: Sequence[int]) -> float:
    """The most bytes in use on each rank at any point."""
    return float(exact_memory(planning, choice).used().max())


def _stored(planning: PlanningProblem, walk: Walk) -> Iterator[StoredBytes]:
    """All storages, those of elided units too, and what is there for a moment."""
    own = {key: Interval(storage.birth, storage.death) for key, storage in walk.storages.items()}
    elided = elided_intervals(planning.liveness, planning.elided, planning.space, own)
    found = [*((key, interval, 1) for key, interval in own.items()), *((key, *there) for key, there in elided.items())]
    ratio = planning.liveness.state_bytes_per_parameter_byte
    for key, interval, number in found:
        storage = walk.storages[key]
        yield StoredBytes(storage.part, interval, storage.size, number)
        if storage.part == "parameters" and ratio:
            yield StoredBytes("optimizer state", interval, storage.size * ratio, number)
    for point, size in _moments(planning, walk):
        yield StoredBytes("activations", Interval(point, point), size)


def _moments(planning: PlanningProblem, walk: Walk) -> Iterator[tuple[int, int]]:
    """Point and bytes of what reshards and rewritten calls need beside what is stored."""
    transients = planning.memory.transients
    for reshard in walk.reshards:
        freed = reshard.storage.death == reshard.point
        yield reshard.point, transients.of_reshard(reshard.moved, freed=freed)
    for call in walk.rewritten:
        yield call.point, call.beside(transients)
