"""The pipelines that recipes may have: ranks, schedule, virtual stages, and how blocks are shared out."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple

from cost_models.schedule_orders import SCHEDULES, admits, usual_schedule


class Pipe(NamedTuple):
    """A pipeline; `schedule` is None for a single rank. With `split_ends` the ends count as blocks."""

    pipeline: int = 1
    schedule: str | None = None
    virtual_stages: int = 1
    split_ends: bool = False

    @property
    def chosen_schedule(self) -> str:
        """Name of the schedule, the usual one for a single rank."""
        return self.schedule or usual_schedule(self.virtual_stages)


class PipeSet(tuple[Pipe, ...]):
    """Some pipelines of as many ranks, in a fixed order; tables are kept by them, so their hash is found once."""

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash


@lru_cache(maxsize=4096)
def known_pipes(ranks: int, micro_batches: int, blocks: int) -> PipeSet:
    """Pipelines of so many ranks whose schedule admits so many micro-batches."""
    if ranks == 1:
        return PipeSet([Pipe()])
    runs = [
        name for name, item in SCHEDULES.items() if admits(name, ranks, micro_batches, item.least_stages)
    ]  # with more virtual stages, too
    return _pipes_of(ranks, frozenset(runs), blocks)


@lru_cache(maxsize=1024)
def _pipes_of(ranks: int, runs: frozenset[str], blocks: int) -> PipeSet:
    """Pipelines of two ranks or more with some schedules: the same set whatever the micro-batches."""
    found: list[Pipe] = []
    for split_ends in (False, True):
        most = (blocks + 2 * split_ends) // ranks
        known = [(schedule, virtual) for schedule, virtual in schedules(most) if schedule in runs]
        found += [Pipe(ranks, schedule, virtual, split_ends) for schedule, virtual in known]
    return PipeSet(found if blocks else ())


def schedules(most: int) -> list[tuple[str, int]]:
    """Schedules that are searched, with each number of virtual stages that they take, to so many."""
    return [
        (item.name, virtual)
        for item in SCHEDULES.values()
        if item.is_searched
        for virtual in item.numbers_of_stages(most)
    ]
