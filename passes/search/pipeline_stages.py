"""The stages of a recipe's pipeline: the blocks of each stage, the rank of each stage, and the time of the schedule.

The layer class `BEFORE` (the embedding) is on the first stage, in front of the blocks. `AFTER` (the head) is on the
last stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import RecipeError
from autoshard.ir.execution import Execution
from cost_models import schedule_orders
from cost_models.errors import CostArgumentError
from cost_models.order_times import StageTimes, schedule_time
from cost_models.schedule_orders import most_in_flight, stage_ranks
from passes.search.layers.fold_program import AFTER, BEFORE

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage.

    `layers` has pairs of a layer class's name and the number of its layers on the stage.
    """

    layers: tuple[tuple[str, int], ...]


def cut_into_stages(blocks: Sequence[str], recipe: Execution) -> tuple[Stage, ...]:
    """Return the stages of a model in order; `blocks` has the layer class of each block.

    The first stage also has the layer class `BEFORE`, and the last stage has `AFTER`.

    Raises:
        RecipeError: there are more stages than blocks, or `stage_layers` has another number of blocks than the model.
    """
    counts = _block_counts(len(blocks), recipe)
    stages, start = [], 0
    for index, count in enumerate(counts):
        names = list(blocks[start : start + count])
        start += count
        names = [BEFORE] * (index == 0) + names + [AFTER] * (index == len(counts) - 1)
        stages.append(Stage(tuple(Counter(names).items())))
    return tuple(stages)


def _block_counts(blocks: int, recipe: Execution) -> tuple[int, ...]:
    """Return the number of blocks on each stage: the recipe's `stage_layers`, or else numbers as even as possible."""
    stages, given = recipe.stages, recipe.stage_layers
    if stages > 1 and blocks < (stages if given is None else 1):
        raise RecipeError(
            f"pipeline={recipe.pipeline} x virtual_stages={recipe.virtual_stages} = {stages} stages cannot share "
            f"{blocks} blocks. Take fewer stages; the blocks are the entries of the model's nn.ModuleList."
        )
    if given is None:
        return even_blocks(blocks, stages)
    if sum(given) != blocks:
        raise RecipeError(f"stage_layers={given!r} shares out {sum(given)} blocks; the model has {blocks}.")
    return tuple(given)


@lru_cache(maxsize=8192)
def even_blocks(blocks: int, stages: int, *, split_ends: bool = False) -> tuple[int, ...]:
    """Return the number of blocks on each stage, as even as possible.

    With `split_ends`, the embedding and the head count as one block each. The first and the last stage then get a block
    less. The result never counts the embedding and the head.

    Example:
        >>> even_blocks(8, 4), even_blocks(8, 4, split_ends=True)
        ((2, 2, 2, 2), (1, 3, 3, 1))
    """
    slots = blocks + 2 * split_ends
    bounds = [round(index * slots / stages) for index in range(stages + 1)]
    counts = [after - before for before, after in pairwise(bounds)]
    for end in (0, -1):
        counts[end] -= split_ends
    return tuple(counts)


def rank_counts(names: Sequence[str], stages: Sequence[Stage], recipe: Execution) -> Floats:
    """Return the number of layers of each class in `names` on each pipeline rank of a recipe, [ranks, classes]."""
    counts = np.zeros((recipe.pipeline, len(names)))
    owners = stage_ranks(recipe.chosen_schedule, recipe.pipeline, recipe.virtual_stages)
    for stage, owner in zip(stages, owners, strict=True):
        counts[owner] += layer_counts(names, stage)
    return counts


def layer_counts(names: Sequence[str], stage: Stage) -> Floats:
    """Return the number of layers of each class in `names` in a stage, [classes]."""
    counts = dict(stage.layers)
    return np.array([counts.get(name, 0) for name in names], dtype=float)


def in_flight(recipe: Execution) -> tuple[float, ...]:
    """Return for each pipeline rank the most micro-batches in flight at once, divided by the number of its stages.

    A micro-batch counts once for each stage of the rank that keeps its activations. The result depends on the order of
    the schedule, and not on times.
    """
    if recipe.pipeline == 1:
        return (1.0,)
    counts = most_in_flight(recipe.chosen_schedule, recipe.pipeline, recipe.micro_batches, recipe.virtual_stages)
    return tuple(count / recipe.virtual_stages for count in counts)


def cuts_backward(recipe: Execution) -> bool:
    """Whether a recipe's schedule runs gradients of inputs and of weights as separate tasks (zero bubble)."""
    return recipe.pipeline > 1 and schedule_orders.cuts_backward(recipe.chosen_schedule)


def stages_time(stages: Sequence[StageTimes], recipe: Execution) -> float:
    """Return the seconds in which the pipeline runs the forward and backward of all micro-batches of a step.

    `stages` are the times of each stage for one micro-batch, in order.

    Raises:
        RecipeError: the schedule does not allow the number of micro-batches or virtual stages.
    """
    if recipe.pipeline == 1:
        (only,) = stages
        return recipe.micro_batches * (only.forward_s + only.backward_s)
    shape = (recipe.micro_batches, recipe.virtual_stages)
    overlaps = recipe.runtime.overlap_pipeline
    try:
        return schedule_time(recipe.chosen_schedule, tuple(stages), *shape, overlap_sends=overlaps)
    except CostArgumentError as error:
        raise RecipeError(f"pipeline={recipe.pipeline}, virtual_stages={recipe.virtual_stages}: {error}") from error
