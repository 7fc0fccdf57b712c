"""Lower bounds over all ways to share blocks out over the stages of a pipeline, one stage on each rank.

Let cost(r, i, j) be a bound on what rank r takes, and with it the whole step, if it has the blocks [i, j): its path
with its ends (`bound_recipes`, 1 and 4), infinite where it does not fit; or its memory. Of all ways to share B blocks
out over ranks r to P - 1, from block i on, none has a lower greatest cost than

    E(r, i) = min over j of max(cost(r, i, j), E(r + 1, j)),      E(P - 1, i) = cost(P - 1, i, B),

which is found by dynamic programming from the last rank to the first. E(0, 0) bounds the set of all; where the first
r stages are chosen and end at i, max(cost(r, i, j), E(r + 1, j)) bounds those whose next stage ends at j.

*Without a table.* A path of rank r, with "Turning" or without, is a sum over stages q of A(r, q) times what stage q
takes. A step of T seconds is no shorter than any of them, so for weights y(r) >= 0 that sum to one

    T >= sum_q (sum_r y(r) A(r, q)) (blocks of q) >= sum over blocks of min_q sum_r y(r) A(r, q).

Weights are best where all ranks q count alike, which they are made to do for all blocks together. Of schedules that do
not cut backwards in two, A(r, q) does not depend on sections: T >= K sum_q (what stage q takes), K the least
sum_r y(r) A(r, q) of all q.

*Clock.* On a device with a power limit a step runs products the faster the longer it is. So parts of a set are bounded
by their costs at the clock of steps somewhat longer than the set's bound, but by no more than what such a step takes at
that clock (`passes.recipe_search.bound_recipes`, 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.recipe import Recipe
from cost_models.hardware import Cluster
from cost_models.step import StepModel
from passes.recipe_search.bound_recipes import (
    ROUNDING,
    EndWorkOf,
    Floats,
    SectionFloors,
    ends_of,
    latencies,
    longer_step,
    mean_products,
    step_floors,
    turning_hops,
)
from passes.recipe_search.pipe_shapes import PipeShapes, Presence, missed_turns, passed_blocks, presence
from passes.sections.fold_program import AFTER, BEFORE

FIRST, MIDDLE, LAST = range(3)
"""Kinds of stages: with what comes before the blocks, with neither end, with what comes after."""

_NOWHERE = -1

_NEAR = 1.05
"""How much longer than the best one a way to share blocks out may be for its ends to be looked at."""


@dataclass(frozen=True, slots=True)
class StageLoads:
    """What stages may have: a range of blocks, and an end.

    Args:
        counts: how often each has each section, equal ones once, [loads, sections]; `present`: whether.
        has: whether a stage of a kind may have a load, [kinds, loads].
        places: which of them a stage of a kind with the blocks [begin, end) has, -1 for none, [kinds, blocks + 1,
            blocks + 1].
        before: how often sections come before a stage that begins there, [blocks + 1, sections].
    """

    counts: Floats
    present: Presence
    has: NDArray[np.bool_]
    places: NDArray[np.int64]
    before: Floats


@lru_cache(maxsize=256)
def stage_loads(names: tuple[str, ...], blocks: tuple[str, ...], *, has_middle: bool = True) -> StageLoads:
    """The loads of a model's stages; `names` is the order of sections, `has_middle`: of three stages or more."""
    passed = passed_blocks(names, blocks)
    begins, ends = np.indices((len(passed), len(passed)))
    allowed = np.stack([(begins == 0) & (ends >= begins), has_middle & (ends > begins), ends == len(blocks)])
    kind, begin, end = np.nonzero(allowed)
    counts = passed[end] - passed[begin]
    counts[kind == FIRST, names.index(BEFORE)] += 1
    counts[kind == LAST, names.index(AFTER)] += 1
    _, first, which = np.unique(_numbered(counts), return_index=True, return_inverse=True)
    places = np.full(allowed.shape, _NOWHERE)
    places[allowed] = which
    has = np.zeros((len(places), len(first)), dtype=bool)
    has[kind, which] = True
    before = passed.copy()
    before[:, names.index(BEFORE)] += 1
    return StageLoads(counts[first], presence(counts[first]), has, places, before)


def _numbered(counts: Floats) -> NDArray[np.int64]:
    """A number for each row of whole numbers, the same for equal ones alone, [rows]."""
    base = int(counts.max()) + 1
    number = np.zeros(len(counts), dtype=np.int64)
    for column in counts.T.astype(np.int64):
        _, number = np.unique(number * base + column, return_inverse=True)
    return number


def _kind(rank: int, ranks: int) -> int:
    """The kind of a pipeline rank's stage."""
    return FIRST if rank == 0 else LAST if rank == ranks - 1 else MIDDLE


@dataclass(frozen=True, slots=True)
class Costs:
    """Bounds on what ranks take by the blocks that they have.

    Args:
        loads: what they may have.
        begins: the part that the rank's first block decides, of all but the first rank, [blocks + 1].
        ranks: the part that the rank and its load decide, [ranks, loads].
        turning: the same of another bound, on all but the last rank, with `ends`, what the first block behind the rank
            decides of it, [blocks + 1]; None where there is none.
    """

    loads: StageLoads
    begins: Floats
    ranks: Floats
    turning: Floats | None = None
    ends: Floats | None = None

    def of(self, rank: int, begins: slice = slice(None), ends: slice = slice(None)) -> Floats:
        """Those of a rank, [begins, ends]."""
        kind = _kind(rank, len(self.ranks))
        places = self.loads.places[kind, begins, ends]
        own = np.append(self.ranks[rank], np.inf)[places]
        if self.turning is not None and self.ends is not None and kind != LAST:
            own = np.maximum(own, np.append(self.turning[rank], np.inf)[places] + self.ends[ends])
        return own if kind == FIRST else self.begins[begins, None] + own

    def least(self) -> Floats:
        """E of the module's docstring, [ranks + 1, blocks + 1]; the first stage begins at 0, the last ends at B."""
        size = len(self.loads.before)
        least = np.full((len(self.ranks) + 1, size), np.inf)
        least[-1, -1] = -np.inf
        for rank in reversed(range(len(self.ranks))):
            begins, ends = self._slices(rank)
            least[rank, begins] = np.maximum(self.of(rank, begins, ends), least[rank + 1, ends]).min(axis=1)
        return least

    def within(self, greatest: float, least: Floats) -> NDArray[np.bool_]:
        """Whether a load may be part of a way to share blocks out whose greatest cost is no larger, [loads].

        `least`: as `least` has it.
        """
        found = np.zeros(len(self.loads.counts), dtype=bool)
        reached = np.arange(len(self.loads.before)) == 0
        for rank in range(len(self.ranks)):
            begins, ends = self._slices(rank)
            may = reached[begins, None] & (np.maximum(self.of(rank, begins, ends), least[rank + 1, ends]) <= greatest)
            found[self.loads.places[_kind(rank, len(self.ranks)), begins, ends][may]] = True
            reached = may.any(axis=0)
        return found

    def _slices(self, rank: int) -> tuple[slice, slice]:
        """Where the blocks of a rank may begin, and end."""
        kind = _kind(rank, len(self.ranks))
        return slice(1 if kind == FIRST else None), slice(-1 if kind == LAST else None, None)


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Bounds on a set of pipelines that share blocks out in any way, and on its parts.

    Args:
        floor: of the whole set; infinite where none fits.
        costs, least: of its ranks, in the unit of `bound`.
        bound: what the greatest cost of a pipeline's ranks says of the pipeline.
    """

    floor: float
    costs: Costs
    least: Floats
    bound: Callable[[Floats], Floats]

    def next_stage(self, stage_blocks: Sequence[int]) -> Floats:
        """Where the first stages have so many blocks: bounds by the number of blocks of the next one."""
        rank, begin = len(stage_blocks), sum(stage_blocks)
        (costs,) = self.costs.of(rank, slice(begin, begin + 1))
        return self.bound(np.maximum(costs, self.least[rank + 1])[begin:])


def uneven_floor(
    floors: SectionFloors, shapes: PipeShapes, recipe: Recipe, cluster: Cluster, model: StepModel
) -> float:
    """Bound on the price of a step, whatever its boundaries and ends; see "Without a table" above.

    Args:
        floors: of the sections.
        shapes: of one of the pipelines.
        recipe: one of the recipes.
        cluster, model: what it is priced for.
    """
    is_whole, ranks = bool(shapes.is_whole[0, 0]), shapes.counts.shape[1]
    counts = shapes.counts[0].sum(axis=0)
    whole, entering, there = (float(counts @ part) for part in _ways_of(floors, 0.0, is_whole=is_whole))
    before, behind = _before(ranks), _before(ranks).T
    weighted = []
    for own, trips in _path_turns(ranks, recipe.micro_batches, alternates=bool(shapes.alternates[0, 0])):
        weights = _evening_weights(np.diag(own) * whole + before * entering + trips[:, None] * behind * there)
        weighted.append((own * weights, weights @ before, (trips * weights) @ behind))

    def at(shares: Floats) -> Floats:
        each = np.array(_ways_of(floors, float(shares[0]), is_whole=is_whole))
        taken = [(np.array(by_ranks).T @ each).min(axis=0) for by_ranks in weighted]
        return np.array([max(counts @ blocks for blocks in taken) + model.step_overhead_s])

    rate = floors.gain_rate if is_whole else 1.0
    return float(step_floors(at, mean_products(floors, shapes, recipe), cluster, model, rate)[0])


@lru_cache(maxsize=1024)
def whole_turns(ranks: int, micro_batches: int, *, alternates: bool) -> float:
    """K of "Without a table": how often a step is as long as a micro-batch's way through all stages and back, at least.

    Of schedules with whole backwards and one stage on each rank; `alternates`: that run both in turn.
    """
    turns = []
    for own, trips in _path_turns(ranks, micro_batches, alternates=alternates):
        paths = np.diag(own) + _before(ranks) + trips[:, None] * _before(ranks).T
        turns.append(float((_evening_weights(paths) @ paths).min()))
    return max(turns)


def _path_turns(ranks: int, micro_batches: int, *, alternates: bool) -> list[tuple[Floats, Floats]]:
    """By kind of path: turns of each rank's own stage on it, and trips to the last rank and back, [ranks] each."""
    nothing = np.zeros(ranks)
    plain = (nothing + micro_batches, nothing)
    if not alternates:
        return [plain]
    missed = missed_turns(ranks, micro_batches)
    return [plain, (micro_batches - np.nan_to_num(missed), np.where(np.isnan(missed), 0.0, 2.0))]


def _before(ranks: int) -> Floats:
    """Whether the second rank comes before the first, [ranks, ranks]."""
    places = np.arange(ranks)
    return (places[:, None] > places).astype(float)


def _ways_of(floors: SectionFloors, share: float, *, is_whole: bool) -> tuple[Floats, Floats, Floats]:
    """What sections take for a micro-batch where the clock takes off such a share of what it can, [sections] each.

    In all; where later ranks wait for it to come in and, of whole backwards, to go out; on the way there and back.
    """
    forward = floors.forward - share * floors.forward_gain
    backward = floors.backward - share * floors.backward_gain
    if is_whole:
        return forward + backward, forward + backward, forward + backward
    return forward + backward + floors.cutting, forward, forward + backward - floors.delayed


def _evening_weights(paths: Floats) -> Floats:
    """Weights of paths, as many as stages, [paths, stages]: they sum to one, and all stages count alike, or nearly.

    Any weights give a bound, so paths for which there are none such get equal ones.
    """
    equal = np.ones(len(paths))
    try:
        weights = np.maximum(0.0, np.linalg.solve(paths.T, equal))
    except np.linalg.LinAlgError:
        weights = equal
    return weights / weights.sum()


def smallest_boundaries(loads: StageLoads, memory: Floats) -> Boundaries:
    """Bounds on memory, of which each rank takes so much with each load, [ranks, loads], bytes."""
    costs = Costs(loads, np.zeros(len(loads.before)), memory)
    least = costs.least()
    return Boundaries(float(least[0, 0]), costs, least, lambda greatest: greatest)


def fastest_boundaries(
    floors: SectionFloors,
    loads: StageLoads,
    fits: NDArray[np.bool_],
    shapes: PipeShapes,
    send_s: float,
    recipe: Recipe,
    work_of: EndWorkOf,
    cluster: Cluster,
    model: StepModel,
    *,
    enough: float,
) -> Boundaries:
    """Bounds on the price of a step; with ends only where they count, of loads near the best ones.

    Args:
        floors, loads: of the pipelines' sections and stages.
        fits: whether a rank has the memory for a load, [ranks, loads].
        shapes: of one of the pipelines.
        send_s: of a hand-over.
        recipe: the recipe, but for its boundaries and sharding.
        work_of: the ends under each of its shardings.
        cluster, model: what it is priced for.
        enough: a price; of what is surely above, bounds may be without ends.
    """
    kinds = [_kind(rank, len(fits)) for rank in range(len(fits))]
    fits = fits & loads.has[kinds]
    sends_s = shapes.hand_overs(recipe.micro_batches, overlaps=recipe.overlap_pipeline)[0] * send_s
    refused = np.where(fits, 0.0, np.inf) + sends_s[:, None]
    latency, latency_gain = latencies(floors, shapes, send_s)
    is_whole, total = bool(shapes.is_whole[0, 0]), shapes.counts[0].sum(axis=0)
    missed = missed_turns(len(fits), recipe.micro_batches)[:, None] if shapes.alternates[0, 0] else None
    more_sends_s = 0.0 if missed is None else turning_hops(missed, overlaps=recipe.overlap_pipeline) * send_s

    def path_costs(share: float) -> Costs:
        whole, entering, there = _ways_of(floors, share, is_whole=is_whole)
        work = loads.counts @ whole
        begins, ranks = loads.before @ entering, refused + recipe.micro_batches * work
        if missed is None:
            return Costs(loads, begins, ranks)
        turning = np.where(np.isnan(missed), -np.inf, ranks + more_sends_s - missed * work)
        return Costs(loads, begins, ranks, turning, 2.0 * ((total - loads.before) @ there))

    def bound(greatest: Floats, share: float) -> Floats:
        return np.maximum(greatest, latency - share * latency_gain) + model.step_overhead_s

    products_s, rate = mean_products(floors, shapes, recipe), floors.gain_rate if is_whole else 1.0

    def may_be_better() -> NDArray[np.bool_]:
        paths = path_costs(0.0)
        least = paths.least()
        found = paths.within(_NEAR * float(least[0, 0]), least)
        share, most = longer_step(products_s, float(bound(least[:1, 0], 0.0)[0]), cluster, model, rate)
        if enough < ROUNDING * most:
            faster = path_costs(share)
            found &= faster.within(enough / ROUNDING - model.step_overhead_s, faster.least())
        return found

    near = may_be_better()
    ends = ends_of(floors, loads.counts[near], work_of) if near.any() else None

    def costs(share: float) -> Costs:
        found = path_costs(share)
        if ends is not None:
            least = ends.least(np.full(near.sum(), share), recipe, model)
            for ranks in (found.ranks, found.turning):
                if ranks is not None:
                    ranks[:, near] += least
        return found

    @cache
    def step_at(share: float) -> Floats:
        return bound(costs(share).least()[:1, 0], share)

    def at(shares: Floats) -> Floats:
        return step_at(float(shares[0]))

    share, most = longer_step(products_s, float(step_at(0.0)[0]), cluster, model, rate)
    fastest = costs(share)
    floor = float(step_floors(at, products_s, cluster, model, rate)[0])
    return Boundaries(
        floor, fastest, fastest.least(), lambda greatest: ROUNDING * np.minimum(bound(greatest, share), most)
    )
