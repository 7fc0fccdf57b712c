"""Lower bounds on recipes whose pipeline passes several islands: `bound_recipes`, each rank by its own island.

1. *Shares.* Let island i have P(i) pipeline ranks and b(i) of the blocks. Some rank of it has at least the mean, so

       T >= m / P(i) (work of b(i) blocks, and of the ends that lie there),

   where the work is that of the b(i) blocks that take least on i. A micro-batch passes all islands and back: T is no
   less than all their work, less the gradients of weights. As P(i) times a stage's ranks is fixed, m / P(i) depends on
   the layout alone, and so does the least of all shares.
2. *Paths and ends* are those of `bound_recipes`, 1 and 4, with each stage's seconds on its own island. Of each island
   the rank with the longest path is taken with its ends.
3. *Memory.* Of an island with n stages and b of the blocks, each stage has floor(b / n) or more, and a rank holds as
   many micro-batches of its stages as its schedule says. Where no schedule leaves every island room, a share is left.
4. *Clock.* With duty X(i) / T(1) of the products of island i, their speed is v(X(i) / T(1)). For every t >= L(1) the
   price is at least min(L(v), t / max v) with v(i) = v(X(i) / t), as in `bound_recipes`, 5; a bound below X(i) will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.recipe import Recipe
from cost_models.hardware import Cluster
from cost_models.power import power_limit
from cost_models.schedule_orders import admits, most_in_flight, stage_ranks
from cost_models.step import StepModel
from passes.recipe_search.bound_memory import whole_bytes
from passes.recipe_search.bound_recipes import ROUNDING, EndWorkOf, Floats, SectionFloors, ends_of
from passes.recipe_search.known_pipes import Share, schedules
from passes.recipe_search.pipe_shapes import PipeShapes
from passes.recipes.pipeline_stages import name_of_schedule
from passes.sections.fold_program import AFTER, BEFORE

_NEVER = 1e-12
"""The least duty: products that take no time."""


def placed_step_floors(at: Callable[[Floats], Floats], products_s: Floats, clusters: Sequence[Cluster]) -> Floats:
    """Bounds on the prices of steps, see "Clock" above.

    Args:
        at: bounds on their times where faster clocks take off such shares of what they can, [steps, islands].
        products_s: bounds on the seconds of products of each, mean over an island's ranks, [steps, islands].
        clusters: the islands.
    """
    is_limited = np.array([cluster.device.matmul.units > 1 for cluster in clusters])

    def speeds(turn: Floats) -> Floats:
        found = power_limit().speeds(np.clip(products_s / turn[:, None], _NEVER, 1.0))
        return np.where(is_limited, found, 1.0)

    turn = at(np.zeros(products_s.shape))
    for _ in range(3):
        known = speeds(turn)
        turn = np.maximum(turn, known.max(axis=1) * at(1.0 - 1.0 / known))
    known = speeds(turn)
    return ROUNDING * np.minimum(at(1.0 - 1.0 / known), turn / known.max(axis=1))


@lru_cache(maxsize=256)
def share_table(shares: tuple[Share, ...]) -> NDArray[np.int64]:
    """Shares as an array, [shares, islands]."""
    return np.array(shares, dtype=np.int64).reshape(len(shares), -1)


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways to run a pipeline over islands.

    A way is a schedule with its virtual stages, and whether blocks are shared out with the ends counted as blocks; one
    that holds no less than another is left out. Ranks without an end of the model, and with one, are apart: [..., 2].

    Args:
        stages: of each island, [ways, islands].
        virtual: of each rank, [ways].
        counted: ends that are counted as blocks of an island, [ways, islands].
        held: micro-batches that the island's fullest such rank holds of its stages, 0 where there is none, [ways,
            islands, 2].
    """

    stages: NDArray[np.int64]
    virtual: NDArray[np.int64]
    counted: NDArray[np.int64]
    held: Floats

    def blocks(self, table: NDArray[np.int64], island: int) -> NDArray[np.int64]:
        """Blocks of a rank of an island at least, by shares of the blocks, [shares, ways, 2]."""
        counted = self.counted[:, island]
        each = self.virtual * ((table[:, island, None] + counted) // self.stages[:, island])
        return np.stack([each, np.maximum(0, each - counted)], axis=-1)


@lru_cache(maxsize=1024)
def ways_over(ranks: tuple[int, ...], micro_batches: int, blocks: int) -> Ways:
    """Those of a model's blocks over islands with so many pipeline ranks."""
    total, places = sum(ranks), range(len(ranks))
    of_ranks = np.array([island for island, count in enumerate(ranks) for _ in range(count)])
    held_by: dict[tuple[int, tuple[int, int]], list[Floats]] = {}
    for schedule, virtual in schedules((blocks + 2) // total):
        name = name_of_schedule(schedule, virtual)
        if admits(name, total, micro_batches, virtual):
            owners = stage_ranks(name, total, virtual)
            held = np.array(most_in_flight(name, total, micro_batches, virtual)) / virtual
            has_end = np.isin(np.arange(total), (owners[0], owners[-1]))
            most = [
                [held[(of_ranks == at) & (has_end == end)].max(initial=0.0) for end in (False, True)] for at in places
            ]
            held_by.setdefault((virtual, (owners[0], owners[-1])), []).append(np.array(most))
    rows = [
        (virtual, split_ends * np.bincount(of_ranks[list(ends)], minlength=len(ranks)), most)
        for (virtual, ends), known in held_by.items()
        for split_ends in (0, 1)
        for most in _least_of(known)
    ]
    virtual = np.array([row[0] for row in rows])
    return Ways(
        stages=virtual[:, None] * np.array(ranks),
        virtual=virtual,
        counted=np.array([row[1] for row in rows]).reshape(len(rows), len(ranks)),
        held=np.array([row[2] for row in rows]).reshape(len(rows), len(ranks), 2),
    )


def _least_of(arrays: Sequence[Floats]) -> list[Floats]:
    """Those arrays that are not everywhere as large as another one."""
    found: list[Floats] = []
    for each in sorted(arrays, key=lambda each: float(each.sum())):
        if not any((other <= each).all() for other in found):
            found.append(each)
    return found


def held_floors(
    ways: Ways, table: NDArray[np.int64], parts: Sequence[tuple[Floats, Floats]], limits: Sequence[float]
) -> Floats:
    """How full the fullest device is at least, of its limit, under the way that fills it least, by shares, [shares].

    Args:
        ways: that there are.
        table: the shares.
        parts: by island, bytes of a block of each kind, and those that each micro-batch keeps of it, [kinds].
        limits: bytes of a device of each island.
    """
    full = np.zeros((len(table), len(ways.virtual)))
    for island, ((states, kept), limit) in enumerate(zip(parts, limits, strict=True)):
        held = ways.held[:, island]
        each = (held > 0) * (states + held[..., None] * kept).min(axis=-1)
        full = np.maximum(full, whole_bytes((ways.blocks(table, island) * each).max(axis=-1)) / limit)
    return full.min(axis=1, initial=math.inf)


@dataclass(frozen=True, slots=True)
class ShareWork:
    """What islands take for a micro-batch, by their share of the blocks, the ends included: bounds, [shares, islands].

    Args:
        work: seconds, forward and backward; `gain`: what an infinitely fast clock takes off them at most.
        delayed: at most what of it stages before do not wait for.
        products: seconds of products at least.
    """

    work: Floats
    gain: Floats
    delayed: Floats
    products: Floats


def share_work(
    floors: Sequence[SectionFloors], names: Sequence[str], blocks: Sequence[str], table: NDArray[np.int64]
) -> ShareWork:
    """What islands take by their shares, [shares, islands]; `names` is the order of sections."""
    return ShareWork(
        work=least_of_shares([each.work for each in floors], names, blocks, table),
        gain=-least_of_shares([-each.gain for each in floors], names, blocks, table),
        delayed=-least_of_shares([-each.delayed for each in floors], names, blocks, table),
        products=least_of_shares([each.products for each in floors], names, blocks, table),
    )


def least_of_shares(
    values: Sequence[Floats], names: Sequence[str], blocks: Sequence[str], table: NDArray[np.int64]
) -> Floats:
    """The least sum that each share of the blocks may have on its island, with the ends, [shares, islands].

    Args:
        values: by island, those of sections.
        names, blocks: the order of sections, and the section of each block.
        table: the shares.
    """
    places = [names.index(name) for name in blocks]
    sums = [np.concatenate([[0.0], np.sort(each[places]).cumsum()]) for each in values]
    found = np.stack([each[table[:, island]] for island, each in enumerate(sums)], axis=1)
    found[:, 0] += values[0][names.index(BEFORE)]
    found[:, -1] += values[-1][names.index(AFTER)]
    return found


def share_floors(
    work: ShareWork, ranks: Floats, micro_batches: int, clusters: Sequence[Cluster], model: StepModel
) -> Floats:
    """Bounds on the price of a step, whatever its pipeline, by shares; see "Shares" above, [shares].

    Args:
        work: of the shares.
        ranks: pipeline ranks of each island, [islands].
        micro_batches: of a step.
        clusters, model: what it is priced for.
    """
    turns = micro_batches / ranks

    def at(shares: Floats) -> Floats:
        taken = work.work - shares * work.gain
        latency = (taken - work.delayed).sum(axis=1)
        return np.maximum((turns * taken).max(axis=1), latency) + model.step_overhead_s

    return placed_step_floors(at, turns * work.products, clusters)


@dataclass(frozen=True, slots=True)
class PlacedFloors:
    """What sections take by pipeline rank, and what it takes to hand a micro-batch on.

    Args:
        floors: by island.
        of_ranks: by pipeline rank, its island, [ranks].
        hops_s: from each pipeline rank to the next, and from the last to the first, seconds, [ranks].
    """

    floors: Sequence[SectionFloors]
    of_ranks: NDArray[np.int64]
    hops_s: Floats

    def by_rank(self, name: str) -> Floats:
        """A value of sections, [ranks, sections]."""
        return np.stack([getattr(each, name) for each in self.floors])[self.of_ranks]

    @property
    def members(self) -> Floats:
        """Which ranks an island has, [ranks, islands]."""
        return np.eye(len(self.floors))[self.of_ranks]


def placed_path_floors(
    placed: PlacedFloors,
    shapes: PipeShapes,
    recipe: Recipe,
    work_of: Sequence[EndWorkOf],
    clusters: Sequence[Cluster],
    model: StepModel,
) -> Floats:
    """Bounds on the price of a step with its ends, see "Paths and ends" above, [pipes].

    Args:
        placed: what sections take on the ranks.
        shapes: of the pipelines.
        recipe: one of those that are bounded; they differ in sharding and pipeline.
        work_of: by island, the ends under each sharding.
        clusters, model: what it is priced for.
    """
    forward, backward, gain_f, gain_b = (
        placed.by_rank(name) for name in ("forward", "backward", "forward_gain", "backward_gain")
    )
    delayed, cutting, products = (placed.by_rank(name) for name in ("delayed", "cutting", "products"))
    members, counts = placed.members, shapes.counts
    is_cut = ~shapes.is_whole
    own = (counts * (forward + backward)).sum(axis=2) + is_cut * (counts * cutting).sum(axis=2)
    own_gain = (counts * (gain_f + gain_b)).sum(axis=2)
    entering = _entering(shapes, forward, backward)
    seconds = entering @ _before(len(members)) + recipe.micro_batches * own + _sends(placed, shapes, recipe)
    entering_gain = np.einsum("pr,ri,rq->pqi", _entering(shapes, gain_f, gain_b), members, _before(len(members)))
    gain = entering_gain + recipe.micro_batches * own_gain[:, :, None] * members
    pipes = np.arange(len(counts))
    virtual = np.array([pipe.virtual_stages for pipe in shapes.pipes])
    latency = (own - is_cut * (counts * (delayed + cutting)).sum(axis=2)).sum(axis=1)
    latency += 2 * virtual * placed.hops_s[:-1].sum()
    latency_gain = own_gain @ members
    longest = []
    for island, floors in enumerate(placed.floors):
        ranks = np.where(members[:, island] > 0, seconds, -np.inf).argmax(axis=1)
        ends = ends_of(floors, counts[pipes, ranks], work_of[island])
        longest.append((seconds[pipes, ranks], gain[pipes, ranks], ends))

    def at(shares: Floats) -> Floats:
        found = latency - (shares * latency_gain).sum(axis=1)
        for island, (path, faster, ends) in enumerate(longest):
            taken = path - (shares * faster).sum(axis=1) + ends.least(shares[:, island], recipe, model)
            found = np.maximum(found, taken)
        return found + model.step_overhead_s

    mean = recipe.micro_batches * ((counts * products).sum(axis=2) @ members) / members.sum(axis=0)
    return placed_step_floors(at, mean, clusters)


def _before(ranks: int) -> Floats:
    """Whether a rank comes before another, [ranks, ranks]."""
    return np.triu(np.ones((ranks, ranks)), 1)


def _entering(shapes: PipeShapes, forward: Floats, backward: Floats) -> Floats:
    """What each rank's first stage takes of the way to later ones, [pipes, ranks]; the last one's is nobody's."""
    first = np.zeros(shapes.counts.shape)
    first[:, :-1] = np.diff(shapes.before, axis=1)
    return (first * forward).sum(axis=2) + shapes.is_whole * (first * backward).sum(axis=2)


def _sends(placed: PlacedFloors, shapes: PipeShapes, recipe: Recipe) -> Floats:
    """Hand-overs on each rank's path, [pipes, ranks]: those before it, and what it waits for, of its faster side."""
    hops_s = placed.hops_s
    before = (1 + shapes.is_whole) * (hops_s @ _before(len(hops_s)))
    if recipe.overlap_pipeline:
        return before
    return before + shapes.waits(recipe.micro_batches) * np.minimum(hops_s, np.roll(hops_s, 1))
