"""Lower bounds on the steps of recipes from what their ranks take in the mean, or the fullest, whatever the schedule.

This is the second of `bound_recipes`. Where a section exchanges parameters or gradients for g seconds beside work of c,
each micro-batch's pass takes `StepModel.beside` of the two, and what adds gradients up comes after it. Without g, c is
alike in many recipes: one table bounds all of a layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoshard.ir.recipe import Recipe
from cost_models.hardware import Cluster
from cost_models.step import StepModel
from passes.recipe_search.bound_recipes import Floats, SectionFloors, step_floors
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
    recipe: Recipe,
    cluster: Cluster,
    model: StepModel,
    *,
    is_whole: bool,
) -> Floats:
    """Bounds on the price of a step, before its ends: the mean of ranks, whole blocks, and latency, [recipes].

    Args:
        floors, exchanges: see `exchanging`.
        counts: how often the model has each section, [sections].
        whole: how many of them the fullest ranks have, if that counts.
        recipe: one of the recipes.
        cluster, model: what it is priced for.
        is_whole: whether no schedule cuts backwards in two.
    """
    each = exchanging(floors, exchanges, recipe, model)
    latency = np.array([counts @ (item.work - item.delayed) for item in floors])
    latency_gain = np.array([counts @ item.gain for item in floors])

    def at(shares: Floats) -> Floats:
        seconds = each.at(shares)
        busy_s = seconds @ counts / recipe.pipeline
        if whole is not None:
            busy_s = np.maximum(busy_s, whole.floor(seconds))
        longest = np.maximum(recipe.micro_batches * busy_s, latency - shares * latency_gain)
        return longest + model.step_overhead_s

    turns = recipe.micro_batches / recipe.pipeline
    rates = np.array([item.gain_rate for item in floors]) if is_whole else 1.0
    return step_floors(at, turns * float(counts @ floors[0].products), cluster, rates)
