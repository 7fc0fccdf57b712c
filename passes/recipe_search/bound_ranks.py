"""Lower bounds on the steps of recipes from what their ranks take in the mean, or the fullest, whatever the schedule.

This is the second of `bound_recipes`. Where a section exchanges parameters or gradients for g seconds beside work of c,
each micro-batch's pass takes `StepModel.beside` of the two, and what adds gradients up comes after it. Without g, c is
alike in many recipes: one table bounds all of a layout.

Where memory leaves only schedules of one stage on each rank with whole backwards, ranks wait for each other, however
blocks are shared out (`bound_boundaries`, "Without a table"): the mean is taken so much longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.recipe import Recipe
from cost_models.hardware import Cluster
from cost_models.schedule_orders import ONE_STAGE
from cost_models.step import StepModel
from passes.recipe_search.bound_boundaries import whole_turns
from passes.recipe_search.bound_recipes import Floats, SectionFloors, step_floors
from passes.recipe_search.known_pipes import PipeSet
from passes.recipe_search.pipe_shapes import by_schedule
from passes.recipes.pipeline_stages import WHOLE_BACKWARDS
from passes.sections.fold_program import AFTER


@dataclass(frozen=True, slots=True)
class WholeBlocks:
    """How many blocks of a kind the fullest ranks of a pipeline have, however they are shared out.

    Args:
        with_end: on the rank with the model's end, any number, [ways].
        beside: on the fullest other rank, at least, [ways].
        kind, end: places of the kind and of the model's end among the sections.
    """

    with_end: Floats
    beside: Floats
    kind: int
    end: int

    def floor(self, seconds: Floats) -> Floats:
        """The least that the fullest rank takes for a micro-batch, of which sections take so many, [..., sections]."""
        each = seconds[..., self.kind, None]
        return np.maximum(seconds[..., self.end, None] + self.with_end * each, self.beside * each).min(axis=-1)


@lru_cache(maxsize=1024)
def whole_blocks(names: tuple[str, ...], blocks: tuple[str, ...], ranks: int) -> WholeBlocks:
    """Those of a model's most frequent blocks on two ranks or more; `names` is the order of sections."""
    name, count = Counter(blocks).most_common(1)[0]
    with_end = np.arange(count + 1.0)
    return WholeBlocks(with_end, np.ceil((count - with_end) / (ranks - 1)), names.index(name), names.index(AFTER))


@dataclass(frozen=True, slots=True)
class Turns:
    """How long steps are at least, in ways of a micro-batch through the whole model and back.

    Args:
        least: micro-batches over pipeline ranks, or more where all schedules leave ranks idle, [recipes] or one for
            all; infinite without a schedule.
        is_whole: whether no schedule cuts backwards in two, likewise.
    """

    least: Floats | float
    is_whole: NDArray[np.bool_] | bool


def turns_within(pipes: PipeSet, micro_batches: int, fits: NDArray[np.bool_]) -> Turns:
    """Those of recipes that may have some of several pipelines of as many ranks: `fits`, [recipes, pipes]."""
    least, cuts = _pipe_turns(pipes, micro_batches)
    return Turns(np.where(fits, least, np.inf).min(axis=1), np.asarray(~(fits & cuts).any(axis=1)))


@lru_cache(maxsize=1024)
def _pipe_turns(pipes: PipeSet, micro_batches: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Of each pipeline, or set of them, and whether it cuts backwards in two, [pipes]."""
    ranks = pipes[0].pipeline
    least, cuts = np.full(len(pipes), micro_batches / ranks), np.zeros(len(pipes), dtype=bool)
    for schedule, (places, _) in by_schedule(pipes).items():
        cuts[places] = schedule not in WHOLE_BACKWARDS
        if schedule in ONE_STAGE:
            turns = whole_turns(ranks, micro_batches, alternates=schedule == "1F1B")
            least[places] = max(micro_batches / ranks, turns)
    return least, cuts


@dataclass(frozen=True, slots=True)
class Exchanging:
    """What sections take for one micro-batch in recipes of a layout that exchange shards in different ways.

    Args:
        forward, backward: at the clock of sustained products, before what is exchanged, [recipes, sections].
        forward_gain, backward_gain: what an infinitely fast clock takes off them at most.
        adding: the part of `backward` that adds gradients up, [recipes, sections].
        gathering, reducing: exchanges beside each, [recipes, sections].
        interference: of exchanges with the work beside them, at least.
    """

    forward: Floats
    backward: Floats
    forward_gain: Floats
    backward_gain: Floats
    adding: Floats
    gathering: Floats
    reducing: Floats
    interference: float

    def at(self, shares: Floats) -> Floats:
        """Both passes, where the clock takes off such shares of what it can, [recipes] or one for all."""
        share = shares[:, None]
        forward = self._beside(self.forward - share * self.forward_gain, self.gathering)
        backward = self._beside(self.backward - self.adding - share * self.backward_gain, self.reducing)
        return forward + backward + self.adding

    def _beside(self, work: Floats, exchange: Floats) -> Floats:
        return np.maximum(exchange, work + self.interference * np.minimum(work, exchange))


def exchanging(
    floors: Sequence[SectionFloors], exchanges: Sequence[Floats], recipe: Recipe, model: StepModel
) -> Exchanging:
    """Of recipes like one: what their sections take alone, and seconds of their exchanges, [2, sections] each.

    Work beside copies to the host is slowed already, once for both.
    """
    return Exchanging(
        np.array([each.forward for each in floors]), np.array([each.backward for each in floors]),
        np.array([each.forward_gain for each in floors]), np.array([each.backward_gain for each in floors]),
        np.array([each.adding for each in floors]), *np.array(exchanges).swapaxes(0, 1),
        interference=model.interference if recipe.offload == "none" else 0.0,
    )  # fmt: skip


def mean_floors(
    floors: Sequence[SectionFloors],
    exchanges: Sequence[Floats],
    counts: Floats,
    whole: WholeBlocks | None,
    turns: Turns,
    recipe: Recipe,
    cluster: Cluster,
    model: StepModel,
) -> Floats:
    """Bounds on the price of a step, before its ends: the mean of ranks, whole blocks, and latency, [recipes].

    Args:
        floors, exchanges: see `exchanging`.
        counts: how often the model has each section, [sections].
        whole: how many of them the fullest ranks have, if that counts.
        turns: of the schedules that the recipes may have.
        recipe: one of the recipes.
        cluster, model: what it is priced for.
    """
    each = exchanging(floors, exchanges, recipe, model)
    latency = np.array([counts @ (item.work - item.delayed) for item in floors])
    latency_gain = np.array([counts @ item.gain for item in floors])

    def at(shares: Floats) -> Floats:
        seconds = each.at(shares)
        busy_s = turns.least * (seconds @ counts)
        if whole is not None:
            busy_s = np.maximum(busy_s, recipe.micro_batches * whole.floor(seconds))
        return np.maximum(busy_s, latency - shares * latency_gain) + model.step_overhead_s

    mean = recipe.micro_batches / recipe.pipeline
    rates = np.where(turns.is_whole, [item.gain_rate for item in floors], 1.0)
    return step_floors(at, mean * float(counts @ floors[0].products), cluster, model, rates)
