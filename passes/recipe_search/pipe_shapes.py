"""Where sections lie in pipelines of as many ranks, what each rank hands over, and what it holds: for bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.schedule_orders import V_SHAPED, in_flight_table
from passes.recipe_search.known_pipes import Pipe, schedule_of
from passes.recipes.pipeline_stages import WHOLE_BACKWARDS
from passes.sections.fold_program import AFTER, BEFORE

Floats = NDArray[np.float64]

_ALTERNATE = frozenset({"1f1b", "zero-bubble"})
"""Schedules of `Recipe` that run forwards and backwards in turn, where each rank has one stage."""


@dataclass(frozen=True, slots=True)
class Presence:
    """Which sections ranks have; those that have the same ones are of a kind.

    Args:
        kinds: whether ranks of a kind have each section, [kinds, sections].
        which: the kind of each rank, [...].
    """

    kinds: NDArray[np.bool_]
    which: NDArray[np.intp]

    def largest(self, values: Floats) -> Floats:
        """The largest values, none of them negative, of sections that each rank has: [sections, ...] to [..., ...]."""
        kinds = self.kinds.reshape(*self.kinds.shape, *(1 for _ in values.shape[1:]))
        return (kinds * values).max(axis=1)[self.which]

    def where(self, index: Any) -> Presence:
        """Those of some of the ranks, by an index of `which`."""
        return Presence(self.kinds, self.which[index])


def presence(counts: Floats) -> Presence:
    """That of ranks which have sections so often, [..., sections]."""
    has = counts.reshape(-1, counts.shape[-1]) > 0
    bits = np.packbits(has, axis=1)
    _, first, which = np.unique(bits.view(f"V{bits.shape[1]}").ravel(), return_index=True, return_inverse=True)
    return Presence(has[first], which.reshape(counts.shape[:-1]))


@dataclass(frozen=True, slots=True)
class PipeShapes:
    """Where sections lie in several pipelines of as many ranks.

    Args:
        counts: how often each rank has each section, [pipes, ranks, sections]; `present`: whether.
        before: how often they come before the rank's first stage, [pipes, ranks, sections].
        sends: hand-overs of a micro-batch by each rank, [pipes, ranks].
        pipes: the pipelines.
        is_whole: whether the schedule does not cut backwards in two, [pipes, 1].
        swaps: whether it is 1F1B, where ranks that do not overlap hand-overs swap them, [pipes, 1].
        alternates: whether each rank has one stage and runs forwards and backwards in turn, [pipes, 1].
        virtual: stages of each rank, [pipes, 1].
        in_rounds: whether they are more than one, which take turns by rounds of micro-batches, [pipes, 1].
        first, last: how often sections are on the rank's first stage, and on its last, [pipes, ranks, sections].
    """

    counts: Floats
    present: Presence
    before: Floats
    sends: Floats
    pipes: tuple[Pipe, ...]
    is_whole: NDArray[np.bool_]
    swaps: NDArray[np.bool_]
    alternates: NDArray[np.bool_]
    virtual: Floats
    in_rounds: NDArray[np.bool_]
    first: Floats
    last: Floats

    def where(self, mask: NDArray[np.bool_]) -> PipeShapes:
        """Those of the pipelines that a mask leaves."""
        if mask.all():
            return self
        pipes = tuple(compress(self.pipes, mask))
        counts, before, sends = self.counts[mask], self.before[mask], self.sends[mask]
        kinds = (self.is_whole[mask], self.swaps[mask], self.alternates[mask], self.virtual[mask], self.in_rounds[mask])
        present, first, last = self.present.where(mask), self.first[mask], self.last[mask]
        return PipeShapes(counts, present, before, sends, pipes, *kinds, first, last)

    def waits(self, micro_batches: int) -> Floats:
        """Hand-overs that each rank waits for in a step, at least, [pipes, ranks]."""
        last = self.counts.shape[1] - 1
        ranks = np.arange(last + 1.0)
        steady = np.maximum(0.0, micro_batches - (last - ranks))
        swapped = steady * (ranks < last) + np.maximum(0.0, steady - 1) * (ranks > 0)
        return np.where(self.swaps, swapped, np.maximum(0.0, self.sends * micro_batches - 1))

    def hand_overs(self, micro_batches: int, *, overlaps: bool) -> Floats:
        """Hand-overs on each rank's path, those beside computation left out if they overlap it, [pipes, ranks]."""
        hops = (1 + self.is_whole) * np.arange(float(self.counts.shape[1]))
        return hops if overlaps else hops + self.waits(micro_batches)


def missed_turns(ranks: int, micro_batches: int) -> Floats:
    """Micro-batches of a rank that others' way takes ("Turning" in `bound_recipes`), [ranks]; NaN where m <= P - r."""
    missed = np.arange(ranks - 1.0, -1.0, -1.0)
    return np.where(missed + 1 < micro_batches, missed, np.nan)


@lru_cache(maxsize=4096)
def held_by(pipes: tuple[Pipe, ...], micro_batches: int) -> Floats:
    """Micro-batches that each rank holds of each of its stages at its peak, [pipes, ranks]."""
    held = np.empty((len(pipes), pipes[0].pipeline))
    for schedule, (places, virtual) in by_schedule(pipes).items():
        held[places] = in_flight_table(schedule, pipes[0].pipeline, micro_batches, virtual) / virtual[:, None]
    return held


@lru_cache(maxsize=1024)
def by_schedule(pipes: tuple[Pipe, ...]) -> Mapping[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Which of some pipelines have a schedule, and their virtual stages."""
    found: dict[str, list[tuple[int, int]]] = {}
    for place, pipe in enumerate(pipes):
        found.setdefault(schedule_of(pipe), []).append((place, pipe.virtual_stages))
    return {schedule: tuple(np.array(items, dtype=np.int64).T) for schedule, items in found.items()}


@lru_cache(maxsize=1024)
def pipe_shapes(names: tuple[str, ...], blocks: tuple[str, ...], pipes: tuple[Pipe, ...]) -> PipeShapes:
    """The shapes of pipelines of as many ranks; `names` is the order of sections, `blocks` the model's."""
    is_v, is_whole, swaps = np.zeros((3, len(pipes), 1), dtype=bool)
    for schedule, (places, _) in by_schedule(pipes).items():
        is_v[places] = schedule in V_SHAPED
        is_whole[places] = schedule in WHOLE_BACKWARDS
        swaps[places] = schedule == "1F1B"
    stages = _stages_in(names, blocks, pipes, is_v.ravel().tolist())
    virtual = np.array([[pipe.virtual_stages] for pipe in pipes])
    alternates = (virtual == 1) & np.array([[pipe.schedule in _ALTERNATE] for pipe in pipes])
    return PipeShapes(
        stages.counts, stages.present, stages.before, stages.sends, pipes, is_whole, swaps, alternates,
        virtual.astype(float), (virtual > 1) & ~is_v, stages.first, stages.last,
    )  # fmt: skip


_UNEVEN = -1
"""The number of a way that is none of the even ones."""


class _Way(NamedTuple):
    """What decides where sections lie in a pipeline; `stage_blocks` where they are not shared out evenly."""

    virtual_stages: int
    split_ends: bool
    is_v: bool
    stage_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Stages:
    """Parts of `PipeShapes`, by way, [ways, ranks, sections], and `sends`, [ways, ranks]."""

    counts: Floats
    present: Presence
    before: Floats
    first: Floats
    last: Floats
    sends: Floats


def _stages_in(names: tuple[str, ...], blocks: tuple[str, ...], pipes: Sequence[Pipe], is_v: Sequence[bool]) -> _Stages:
    """Those of pipelines of as many ranks."""
    ranks = pipes[0].pipeline
    ways = [
        _Way(pipe.virtual_stages, pipe.split_ends, v_shaped, pipe.stage_blocks)
        for pipe, v_shaped in zip(pipes, is_v, strict=True)
    ]
    even = _even_ways(ranks, len(blocks))
    places = [even.get(way, _UNEVEN) for way in ways]
    if _UNEVEN in places:
        return _stages(names, blocks, ranks, ways)
    table = _even_stages(names, blocks, ranks)
    parts = (table.before, table.first, table.last, table.sends)
    return _Stages(table.counts[places], table.present.where(places), *(part[places] for part in parts))


@lru_cache(maxsize=256)
def _even_ways(ranks: int, blocks: int) -> Mapping[_Way, int]:
    """All ways to share blocks out evenly over so many ranks, numbered; a single one has one stage."""
    if ranks == 1:
        return {_Way(1, False, False): 0}
    found: list[_Way] = []
    for split_ends in (False, True):
        most = (blocks + 2 * split_ends) // ranks
        found += [_Way(virtual, split_ends, False) for virtual in range(1, most + 1)]
        found += [_Way(2, split_ends, True)] if most >= 2 else []
    return {way: place for place, way in enumerate(found)}


def even_counts(names: tuple[str, ...], blocks: tuple[str, ...], ranks: int) -> tuple[Floats, NDArray[np.bool_]]:
    """How often ranks have each section, by way to share blocks out evenly, and which of these are V-shaped.

    [ways, ranks, sections] and [ways].
    """
    ways = _even_ways(ranks, len(blocks))
    return _even_stages(names, blocks, ranks).counts, np.array([way.is_v for way in ways])


@lru_cache(maxsize=256)
def _even_stages(names: tuple[str, ...], blocks: tuple[str, ...], ranks: int) -> _Stages:
    """Those of all ways to share blocks out evenly."""
    return _stages(names, blocks, ranks, list(_even_ways(ranks, len(blocks))))


def _stages(names: tuple[str, ...], blocks: tuple[str, ...], ranks: int, ways: Sequence[_Way]) -> _Stages:
    """Those of some ways."""
    sections, passed = len(names), passed_blocks(names, blocks)
    is_v = np.array([way.is_v for way in ways])
    of, stage, ends = _stage_ends(ranks, ways, len(blocks))
    is_first, is_last = stage == 0, np.append(stage[1:] == 0, True)
    begins = np.where(is_first, 0, np.roll(ends, 1))
    held = passed[ends] - passed[begins]
    held[is_first, names.index(BEFORE)] += 1
    held[is_last, names.index(AFTER)] += 1
    owners = np.where(is_v[of] & (stage >= ranks), 2 * ranks - 1 - stage, stage % ranks)
    places, size = of * ranks + owners, len(ways) * ranks
    counts = np.stack([np.bincount(places, each, size) for each in held.T], axis=1).astype(float)
    (handed,) = np.nonzero(~is_last[:-1] & (owners[1:] != owners[:-1]))
    sends = np.bincount(places[handed], minlength=size) + np.bincount(places[handed + 1], minlength=size)
    shape, is_before = (len(ways), ranks, sections), stage < ranks
    before = passed[begins[is_before]].reshape(shape)
    before[:, 1:, names.index(BEFORE)] += 1
    virtual = np.array([way.virtual_stages for way in ways])
    first, last = (held[part].reshape(shape) for part in (is_before, stage >= (virtual[of] - 1) * ranks))
    counts = counts.reshape(shape)
    return _Stages(counts, presence(counts), before, first, last, sends.astype(float).reshape(shape[:2]))


def _stage_ends(ranks: int, ways: Sequence[_Way], blocks: int) -> tuple[NDArray[np.int64], ...]:
    """By stage of one way after the other: the way, the stage's number, and blocks up to its end."""
    stages, split = np.array([(ranks * way.virtual_stages, way.split_ends) for way in ways]).T
    first, of = np.cumsum(stages) - stages, np.repeat(np.arange(len(ways)), stages)
    stage = np.arange(len(of)) - first[of]
    bounds = np.rint((stage + 1) * (blocks + 2 * split)[of] / stages[of]).astype(np.int64)
    ends = np.minimum(bounds - split[of], blocks)  # as `pipeline_stages.even_blocks`
    for place, way in enumerate(ways):
        if way.stage_blocks:
            ends[first[place] : first[place] + stages[place]] = np.cumsum(way.stage_blocks)
    return of, stage, ends


@lru_cache(maxsize=256)
def passed_blocks(names: tuple[str, ...], blocks: tuple[str, ...]) -> Floats:
    """How often sections come among the first blocks, none to all of them, [blocks + 1, sections]."""
    places = np.array([names.index(name) for name in blocks], dtype=int)
    one_each = np.eye(len(names))[places]
    return np.concatenate([np.zeros((1, len(names))), one_each.cumsum(axis=0)])
