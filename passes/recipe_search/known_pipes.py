"""The pipelines that recipes may have: ranks, schedule, virtual stages, and how blocks are shared out."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.schedule_orders import admits
from passes.recipes.pipeline_stages import even_blocks, name_of_schedule

_MOST_WAYS = 1000
"""Where there are more ways to share blocks out over stages, they are shared out evenly."""


class Pipe(NamedTuple):
    """A pipeline, or a set of them; `schedule` is "" for a single rank.

    `uneven`: blocks are shared out in another way than evenly, to each stage as many as `stage_blocks` says; where that
    is shorter than the pipeline, this is the set of all pipelines that begin so.
    """

    pipeline: int = 1
    schedule: str = ""
    virtual_stages: int = 1
    split_ends: bool = False
    uneven: bool = False
    stage_blocks: tuple[int, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether this is a set of pipelines."""
        return self.uneven and len(self.stage_blocks) < self.pipeline


class PipeSet(tuple[Pipe, ...]):
    """Some pipelines of as many ranks, in a fixed order; tables are kept by them, so their hash is found once."""

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def is_open(self) -> NDArray[np.bool_]:
        """Which of them are sets of pipelines."""
        return np.array([pipe.is_open for pipe in self], dtype=bool)

    @cached_property
    def open(self) -> PipeSet:
        """Those."""
        return PipeSet(compress(self, self.is_open))

    @cached_property
    def closed(self) -> PipeSet:
        """All others."""
        return PipeSet(compress(self, ~self.is_open)) if self.is_open.any() else self


def schedule_of(pipe: Pipe) -> str:
    """The name of a pipeline's schedule in `cost_models.schedule_orders`."""
    return name_of_schedule(pipe.schedule or None, pipe.virtual_stages)


@lru_cache(maxsize=4096)
def known_pipes(ranks: int, micro_batches: int, blocks: int) -> PipeSet:
    """Pipelines of so many ranks whose schedule admits so many micro-batches."""
    if ranks == 1:
        return PipeSet([Pipe()])
    least = dict(reversed(schedules(2)))
    runs = [
        schedule
        for schedule, virtual in least.items()
        if admits(name_of_schedule(schedule, virtual), ranks, micro_batches, virtual)
    ]  # with more virtual stages, too
    return _pipes_of(ranks, frozenset(runs), blocks)


@lru_cache(maxsize=1024)
def _pipes_of(ranks: int, runs: frozenset[str], blocks: int) -> PipeSet:
    """Pipelines of two ranks or more with some schedules: the same set whatever the micro-batches."""
    found: list[Pipe] = []
    for split_ends in (False, True):
        most = (blocks + 2 * split_ends) // ranks
        known = [(schedule, virtual) for schedule, virtual in schedules(most) if schedule in runs and virtual <= most]
        found += [Pipe(ranks, schedule, virtual, split_ends) for schedule, virtual in known]
    if may_be_uneven(blocks, ranks):
        known = ("gpipe", "1f1b", "zero-bubble")
        found += [Pipe(ranks, schedule, uneven=True) for schedule in known if schedule in runs]
    return PipeSet(found if blocks else ())


def schedules(most: int) -> list[tuple[str, int]]:
    """Schedules with their virtual stages, to so many."""
    shapes = [("gpipe", 1), ("1f1b", 1), ("zbv", 2), ("dualpipev", 2)]
    shapes += [("interleaved-1f1b", virtual) for virtual in range(2, most + 1)]
    return shapes + [("zero-bubble", virtual) for virtual in range(1, most + 1)]


def may_be_uneven(blocks: int, ranks: int) -> bool:
    """Whether blocks may be shared out unevenly: on two ranks or more, all but the ends with a block, in few ways."""
    return ranks > 1 and 0 < math.comb(blocks + 1, ranks - 1) <= _MOST_WAYS


@lru_cache(maxsize=1024)
def even_ways(blocks: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """How blocks are shared out evenly: what has no need of `stage_blocks`."""
    kinds = [split_ends for split_ends in (False, True) if stages <= blocks + 2 * split_ends]
    return tuple(even_blocks(blocks, stages, split_ends=split_ends) for split_ends in kinds)
