"""Lower bounds on the memory of recipes, from what sections keep and hold.

Where the stages of ranks are known, the bound is the price (`passes.recipes.price_memory`) but for rounding: what lies
there all the time, and what the micro-batches of a schedule need or, where that is more, the update.

Before they are known, the mean of the ranks bounds a layout: each holds what a micro-batch keeps on its stages, and the
state of their parameters under the ZeRO stage that shards most of those that are searched.

Every bound is taken less one part in 10^9, and a byte for each part, for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.execution import Execution
from passes.recipe_search.bound_recipes import ROUNDING, Floats
from passes.recipe_search.pipe_shapes import PipeShapes, Presence
from passes.recipe_search.recipe_space import KEEPINGS, Keeping
from passes.recipes.price_memory import (
    again_bytes,
    gathered_bytes,
    is_offloaded,
    kept_bytes,
    state_bytes,
    update_bytes,
)
from passes.sections.fold_program import AFTER, BEFORE
from passes.sections.price_sections import SectionSizes

_PARTS = 8
"""Parts of memory at most, see `passes.recipes.price_memory`."""

_KINDS = {keeping: Execution(recompute=keeping.recompute, offload=keeping.offload) for keeping in KEEPINGS}


class ParameterBytes(NamedTuple):
    """What a rank holds for each parameter of the model's that it has: shards of it, or all."""

    state: float
    update: float
    """Beside the parameter, its gradient and state, while it is updated; in place of what a micro-batch needs."""


def parameter_bytes(shards: float, recipe: Execution) -> ParameterBytes:
    """Those of a recipe, where it shards over so many ranks."""
    return ParameterBytes(sum(state_bytes(1.0, shards, recipe).values()), update_bytes(1.0, shards, recipe))


@dataclass(frozen=True, slots=True)
class SectionParameters:
    """What recipes that differ in sharding hold for sections' parameters on each rank that has them, bytes.

    Args:
        states: parameters with gradients and state, [shardings, sections].
        updates: beside them while they are updated, [shardings, sections].
        gathers: whether blocks' parameters are gathered, [shardings].
    """

    states: Floats
    updates: Floats
    gathers: NDArray[np.bool_]


def section_parameters(
    sections: Mapping[str, SectionSizes],
    shardings: Sequence[tuple[ParameterBytes, ParameterBytes]],
    gathers: Sequence[bool],
) -> SectionParameters:
    """Those of shardings under which each parameter takes so much, and each of experts, by whether they gather."""
    elements = parameters_of(sections)
    each = np.array(shardings)  # [shardings, (dense, experts), (state, update)]
    return SectionParameters(each[..., 0] @ elements.T, each[..., 1] @ elements.T, np.array(gathers, dtype=bool))


def parameters_of(sections: Mapping[str, SectionSizes]) -> Floats:
    """How many parameters each section has, and how many of experts, [sections, 2]."""
    return np.array([(size.parameters, size.expert_parameters) for size in sections.values()], dtype=float)


class Passing(NamedTuple):
    """What ranks hold but for parameters, gradients and state, bytes.

    `gathered`: of blocks' parameters, where they are gathered; `rest`: of all else.
    """

    rest: Floats
    gathered: Floats


def memory_floors(shapes: PipeShapes, parameters: SectionParameters, passing: Passing) -> Floats:
    """Bounds on the memory of the fullest rank of each pipeline, bytes: the price itself, but for rounding.

    Args:
        shapes: of the pipelines.
        parameters: what shardings hold for them.
        passing: on each rank, [pipes, ranks].

    Returns:
        [shardings, pipes].
    """
    by_rank = shapes.counts.reshape(-1, shapes.counts.shape[-1])
    states, updates = (
        (by_rank @ each.T).reshape(*shapes.counts.shape[:-1], -1) for each in (parameters.states, parameters.updates)
    )
    beside = passing.rest[..., None]
    if parameters.gathers.any():
        beside = beside + passing.gathered[..., None] * parameters.gathers
    return whole_bytes(states + np.maximum(beside, updates)).max(axis=1).T


def passing_bytes(
    sections: Mapping[str, SectionSizes], counts: Floats, present: Presence, held: Floats, recipe: Execution
) -> Passing:
    """What ranks hold but for parameters, gradients and state, while they run micro-batches.

    Args:
        sections: what they keep and hold.
        counts: how often each rank has each section, [..., sections]; `present`: whether.
        held: micro-batches that each rank holds at its peak, [...].
        recipe: what is kept.
    """

    def each(of: Callable[[SectionSizes, str, Execution], float]) -> Floats:
        return np.array([of(size, name, recipe) for name, size in sections.items()], dtype=float)

    passing = held * (counts @ section_kept(sections, recipe))
    passing += present.largest(each(working_bytes))
    if recipe.offload == "activations":
        away = each(away_bytes)
        passing += np.minimum(2.0 * present.largest(away), held * (counts @ away))
    gathered = each(lambda size, name, _: 0.0 if name in (BEFORE, AFTER) else gathered_bytes(size, recipe))
    return Passing(passing, present.largest(gathered))


def section_kept(sections: Mapping[str, SectionSizes], recipe: Execution) -> Floats:
    """Bytes that a micro-batch keeps of sections, [sections]."""
    return np.array([held_bytes(size, name, recipe) for name, size in sections.items()], dtype=float)


def working_bytes(size: SectionSizes, name: str, recipe: Execution) -> int:
    """Bytes that a section holds while its backward runs: its workspace, and what is computed again."""
    return size.workspace_bytes + again_bytes(size, name, recipe)


def held_bytes(size: SectionSizes, name: str, recipe: Execution) -> int:
    """Bytes that a micro-batch keeps of a section on the device."""
    return 0 if is_offloaded(name, recipe) else kept_bytes(size, name, recipe)


def away_bytes(size: SectionSizes, name: str, recipe: Execution) -> int:
    """Bytes that a micro-batch keeps of a section on the host."""
    return kept_bytes(size, name, recipe) if is_offloaded(name, recipe) else 0


def layout_memory_floors(
    sections: Mapping[str, SectionSizes],
    whole: Floats,
    most: int,
    parameters: Floats,
    keepings: Sequence[Keeping],
) -> Floats:
    """Bounds on the memory of the recipes of a layout, by what becomes of blocks' values, bytes: the mean of ranks.

    Args:
        sections: what they keep and hold.
        whole: how often the model has each, [sections].
        most: pipeline ranks at most; each holds one micro-batch at least.
        parameters: bytes of each parameter's state over all pipeline ranks, and of experts', [2].
        keepings: what may become of blocks' values.

    Returns:
        [keepings].
    """
    kept = np.array([section_kept(sections, _KINDS[each]) for each in keepings]).reshape(-1, len(sections))
    workspace = min(size.workspace_bytes for size in sections.values())
    return whole_bytes((kept @ whole + whole @ parameters_of(sections) @ parameters) / most + workspace)


def whole_bytes(floors: Floats) -> Floats:
    """Bounds on prices of memory, of which each part is cut to whole bytes."""
    return ROUNDING * floors - _PARTS
