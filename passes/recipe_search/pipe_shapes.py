"""Places of sections in pipelines of as many ranks, and the micro-batches that each rank holds: for bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.schedule_orders import SCHEDULES, cuts_backward, most_in_flight
from passes.recipe_search.known_pipes import Pipe
from passes.sections.fold_program import AFTER, BEFORE

Floats = NDArray[np.float64]


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
        pipes: the pipelines.
        is_whole: whether the schedule does not cut backwards in two, [pipes, 1].
    """

    counts: Floats
    present: Presence
    before: Floats
    pipes: tuple[Pipe, ...]
    is_whole: NDArray[np.bool_]

    def where(self, mask: NDArray[np.bool_]) -> PipeShapes:
        """Those of the pipelines that a mask leaves."""
        if mask.all():
            return self
        pipes = tuple(compress(self.pipes, mask))
        parts = (self.counts[mask], self.present.where(mask), self.before[mask])
        return PipeShapes(*parts, pipes, self.is_whole[mask])


@lru_cache(maxsize=4096)
def held_by(pipes: tuple[Pipe, ...], micro_batches: int) -> Floats:
    """Micro-batches that each rank holds of each of its stages at its peak, [pipes, ranks]."""
    held = [most_in_flight(pipe.chosen_schedule, pipe.pipeline, micro_batches, pipe.virtual_stages) for pipe in pipes]
    return np.array(held) / np.array([[pipe.virtual_stages] for pipe in pipes])


@lru_cache(maxsize=1024)
def pipe_shapes(names: tuple[str, ...], blocks: tuple[str, ...], pipes: tuple[Pipe, ...]) -> PipeShapes:
    """The shapes of pipelines of as many ranks; `names` is the order of sections, `blocks` the model's."""
    is_whole = np.array([[not cuts_backward(pipe.chosen_schedule)] for pipe in pipes])
    ways, table = _ways(pipes[0].pipeline, len(blocks)), _stages(names, blocks, pipes[0].pipeline)
    places = [
        ways[_BlockShares(pipe.virtual_stages, pipe.split_ends, SCHEDULES[pipe.chosen_schedule].is_v)] for pipe in pipes
    ]
    return PipeShapes(table.counts[places], table.present.where(places), table.before[places], pipes, is_whole)


class _BlockShares(NamedTuple):
    """One way to share blocks out over the stages of a pipeline, which decides where sections lie."""

    virtual_stages: int
    split_ends: bool
    is_v: bool


@dataclass(frozen=True, slots=True)
class _Stages:
    """Parts of `PipeShapes`, by way, [ways, ranks, sections]."""

    counts: Floats
    present: Presence
    before: Floats


@lru_cache(maxsize=256)
def _ways(ranks: int, blocks: int) -> Mapping[_BlockShares, int]:
    """All ways to share blocks out evenly over so many ranks, numbered; a single one has one stage."""
    if ranks == 1:
        return {_BlockShares(1, False, False): 0}
    found: list[_BlockShares] = []
    for split_ends in (False, True):
        most = (blocks + 2 * split_ends) // ranks
        found += [_BlockShares(virtual, split_ends, False) for virtual in range(1, most + 1)]
        found += [_BlockShares(2, split_ends, True)] if most >= 2 else []
    return {way: place for place, way in enumerate(found)}


@lru_cache(maxsize=256)
def _stages(names: tuple[str, ...], blocks: tuple[str, ...], ranks: int) -> _Stages:
    """Those of all ways to share blocks out evenly."""
    ways, sections, passed = list(_ways(ranks, len(blocks))), len(names), _passed_blocks(names, blocks)
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
    shape, is_before = (len(ways), ranks, sections), stage < ranks
    before = passed[begins[is_before]].reshape(shape)
    before[:, 1:, names.index(BEFORE)] += 1
    counts = counts.reshape(shape)
    return _Stages(counts, presence(counts), before)


def _stage_ends(ranks: int, ways: Sequence[_BlockShares], blocks: int) -> tuple[NDArray[np.int64], ...]:
    """By stage of one way after the other: the way, the stage's number, and blocks up to its end."""
    stages, split = np.array([(ranks * way.virtual_stages, way.split_ends) for way in ways]).T
    first, of = np.cumsum(stages) - stages, np.repeat(np.arange(len(ways)), stages)
    stage = np.arange(len(of)) - first[of]
    bounds = np.rint((stage + 1) * (blocks + 2 * split)[of] / stages[of]).astype(np.int64)
    ends = np.minimum(bounds - split[of], blocks)  # as `pipeline_stages.even_blocks`
    return of, stage, ends


def _passed_blocks(names: tuple[str, ...], blocks: tuple[str, ...]) -> Floats:
    """How often sections come among the first blocks, none to all of them, [blocks + 1, sections]."""
    places = np.array([names.index(name) for name in blocks], dtype=int)
    one_each = np.eye(len(names))[places]
    return np.concatenate([np.zeros((1, len(names))), one_each.cumsum(axis=0)])
