"""The pipelines that recipes may have: ranks, schedule, virtual stages, and how blocks are shared out."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple

from cost_models.schedule_orders import admits
from passes.recipes.pipeline_stages import name_of_schedule


class Pipe(NamedTuple):
    """A pipeline; `schedule` is "" for a single rank. With `split_ends` the ends count as blocks that are shared out."""

    pipeline: int = 1
    schedule: str = ""
    virtual_stages: int = 1
    split_ends: bool = False


class PipeSet(tuple[Pipe, ...]):
    """Some pipelines of as many ranks, in a fixed order; tables are kept by them, so their hash is found once."""

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash


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
    return PipeSet(found if blocks else ())


def schedules(most: int) -> list[tuple[str, int]]:
    """Schedules with their virtual stages, to so many."""
    shapes = [("gpipe", 1), ("1f1b", 1), ("zbv", 2), ("dualpipev", 2)]
    shapes += [("interleaved-1f1b", virtual) for virtual in range(2, most + 1)]
    return shapes + [("zero-bubble", virtual) for virtual in range(1, most + 1)]
