"""Lower bounds on the memory of recipes, from what sections keep and hold.

Where the stages of ranks are known, the bound is the price (`passes.recipes.price_memory`) but for rounding: what lies
there all the time, and what the micro-batches of a schedule need or, where that is more, the update.

Whatever the schedule and its virtual stages, rank r of P holds P - r micro-batches of each of its stages at its peak,
or all that there are, or more; under "zbv" that is so with ranks counted from the other end. So the least of all
pipelines, under the ZeRO stage that shards most of those that are searched, bounds a layout before anything is priced.

Where blocks are shared out in any way, with one stage on each of P ranks, rank r holds h(r) >= min(P - r, m)
micro-batches and has n(r, k) of the N(k) sections k, each with state s(k) and, for a micro-batch, q(k). So the greatest
memory M has

    M >= sum_k n(r, k) (s(k) + h(r) q(k))  for all r,
    Z M >= sum_k N(k) min_r (s(k) + h(r) q(k)) / (S + h(r) Q)

with S = sum N s, Q = sum N q, Z = sum_r 1 / (S + h(r) Q): the rows are added with weights 1 / (S + h(r) Q). Each term
of the minimum rises or falls with h(r), so its ends are enough. With the u(k) that the update of section k needs

    P M >= sum_k N(k) (s(k) + u(k)).

Every bound is taken less one part in 10^9, and a byte for each part, for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.recipe import Recipe
from passes.recipe_search.bound_recipes import ROUNDING, Floats
from passes.recipe_search.known_pipes import may_be_uneven
from passes.recipe_search.pipe_shapes import PipeShapes, Presence, even_counts, presence
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

_KINDS = {keeping: Recipe(recompute=keeping.recompute, offload=keeping.offload) for keeping in KEEPINGS}


class ParameterBytes(NamedTuple):
    """What a rank holds for each parameter of the model's that it has: shards of it, or all."""

    state: float
    update: float
    """Beside the parameter, its gradient and state, while it is updated; in place of what a micro-batch needs."""


def parameter_bytes(shards: float, recipe: Recipe) -> ParameterBytes:
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
    return rank_floors(shapes.counts, parameters, passing).max(axis=1).T


def rank_floors(counts: Floats, parameters: SectionParameters, passing: Passing) -> Floats:
    """Bounds on the memory of ranks, bytes, likewise.

    Args:
        counts: how often each rank has each section, [..., sections].
        parameters: what shardings hold for them.
        passing: on each rank, [...].

    Returns:
        [..., shardings].
    """
    by_rank = counts.reshape(-1, counts.shape[-1])
    states, updates = (
        (by_rank @ each.T).reshape(*counts.shape[:-1], -1) for each in (parameters.states, parameters.updates)
    )
    beside = passing.rest[..., None]
    if parameters.gathers.any():
        beside = beside + passing.gathered[..., None] * parameters.gathers
    return whole_bytes(states + np.maximum(beside, updates))


def passing_bytes(
    sections: Mapping[str, SectionSizes], counts: Floats, present: Presence, held: Floats, recipe: Recipe
) -> Passing:
    """What ranks hold but for parameters, gradients and state, while they run micro-batches.

    Args:
        sections: what they keep and hold.
        counts: how often each rank has each section, [..., sections]; `present`: whether.
        held: micro-batches that each rank holds at its peak, [...].
        recipe: what is kept.
    """

    def each(of: Callable[[SectionSizes, str, Recipe], float]) -> Floats:
        return np.array([of(size, name, recipe) for name, size in sections.items()], dtype=float)

    passing = held * (counts @ section_kept(sections, recipe))
    passing += present.largest(each(working_bytes))
    if recipe.offload == "activations":
        away = each(away_bytes)
        passing += np.minimum(2.0 * present.largest(away), held * (counts @ away))
    gathered = each(lambda size, name, _: 0.0 if name in (BEFORE, AFTER) else gathered_bytes(size, recipe))
    return Passing(passing, present.largest(gathered))


def section_kept(sections: Mapping[str, SectionSizes], recipe: Recipe) -> Floats:
    """Bytes that a micro-batch keeps of sections, [sections]."""
    return np.array([held_bytes(size, name, recipe) for name, size in sections.items()], dtype=float)


def uneven_memory_floors(
    sections: Mapping[str, SectionSizes],
    whole: Floats,
    held: Floats,
    parameters: SectionParameters,
    recipe: Recipe,
) -> Floats:
    """Bounds on the memory of the fullest rank however blocks are shared out, bytes; see the module's docstring.

    Args:
        sections: what they keep and hold.
        whole: how often the model has each, [sections].
        held: h(r), micro-batches that each rank holds at its peak, by schedule, [pipes, ranks].
        parameters: what shardings hold for them.
        recipe: what is kept.

    Returns:
        [shardings, pipes].
    """
    kept, held = section_kept(sections, recipe), held[..., None]
    each = parameters.states[:, None, None] + held * kept
    weights = 1.0 / (each @ whole)
    least = (weights[..., None] * each).min(axis=2)
    workspace = min(size.workspace_bytes for size in sections.values())
    running = (least @ whole) / weights.sum(axis=2) + workspace
    updated = (parameters.states + parameters.updates) @ whole / held.shape[1]
    return whole_bytes(np.maximum(running, updated[:, None]))


@dataclass(frozen=True, slots=True)
class PipeRanks:
    """The ranks of pipelines of several sizes, one pipeline after the other.

    Without those that have no more of any section than one before them, which holds as many micro-batches or more.

    Args:
        counts: how often each rank has each section, [ranks of all, sections]; `present`: whether.
        held: micro-batches that each holds if there are so many, at least, [ranks of all].
        sizes: ranks of its pipeline, [ranks of all].
        first: where each pipeline begins, [pipes].
        uneven: the same of one pipeline of each size over which blocks may be shared out unevenly.
    """

    counts: Floats
    present: Presence
    held: Floats
    sizes: Floats
    first: NDArray[np.intp]
    uneven: NDArray[np.intp]


@lru_cache(maxsize=1024)
def pipe_ranks(names: tuple[str, ...], blocks: tuple[str, ...], sizes: tuple[int, ...]) -> PipeRanks:
    """Those of all pipelines of some sizes, whatever their schedule; `names` is the order of sections."""
    known = {size: _leading_ranks(names, blocks, size) for size in sizes}
    pipes = [(size, *leading) for size, every in known.items() for leading in every]
    kept = [len(held) for _, _, held in pipes]
    first = np.cumsum([0, *kept])[:-1]
    one_each = np.cumsum([0, *map(len, known.values())])[:-1]
    uneven = [begin for size, begin in zip(known, first[one_each], strict=True) if may_be_uneven(len(blocks), size)]
    counts = np.concatenate([counts for _, counts, _ in pipes])
    return PipeRanks(
        counts,
        presence(counts),
        np.concatenate([held for _, _, held in pipes]),
        np.repeat([float(size) for size, _, _ in pipes], kept),
        first,
        np.array(uneven, dtype=np.intp),
    )


@lru_cache(maxsize=1024)
def _leading_ranks(names: tuple[str, ...], blocks: tuple[str, ...], size: int) -> list[tuple[Floats, Floats]]:
    """Of each even pipeline of a size, those ranks before which none has as many of all sections: counts, and held."""
    counts, is_v = even_counts(names, blocks, size)
    both = np.concatenate([counts, counts[is_v, ::-1]])
    tables = np.array(list({table.tobytes(): table for table in both}.values()))
    has_all = (tables[:, :, None] >= tables[:, None]).all(axis=3)  # [pipes, other, rank]
    leading = np.asarray(~(has_all & np.triu(np.ones((size, size), dtype=bool), 1)).any(axis=1))
    held = np.arange(size, 0.0, -1.0)
    return [(table[kept], held[kept]) for table, kept in zip(tables, leading, strict=True)]


def working_bytes(size: SectionSizes, name: str, recipe: Recipe) -> int:
    """Bytes that a section holds while its backward runs: its workspace, and what is computed again."""
    return size.workspace_bytes + again_bytes(size, name, recipe)


def held_bytes(size: SectionSizes, name: str, recipe: Recipe) -> int:
    """Bytes that a micro-batch keeps of a section on the device."""
    return 0 if is_offloaded(name, recipe) else kept_bytes(size, name, recipe)


def away_bytes(size: SectionSizes, name: str, recipe: Recipe) -> int:
    """Bytes that a micro-batch keeps of a section on the host."""
    return kept_bytes(size, name, recipe) if is_offloaded(name, recipe) else 0


def layout_memory_floors(
    sections: Mapping[str, SectionSizes],
    ranks: PipeRanks,
    recipe: Recipe,
    parameters: Floats,
    keepings: Sequence[Keeping],
    *,
    whole: Floats | None,
) -> Floats:
    """Bounds on the memory of the recipes of a layout, by what becomes of blocks' values, bytes.

    Args:
        sections: what they keep and hold.
        ranks: of the pipelines that the recipes have.
        recipe: one of the recipes.
        parameters: `ParameterBytes` of each rank, of experts the second, [ranks of all, 2, 2].
        keepings: what may become of blocks' values.
        whole: how often the model has each section, [sections], where blocks may be shared out unevenly; else None.

    Returns:
        [keepings].
    """
    micro_batches = recipe.batch / recipe.micro_batch * recipe.context * recipe.tensor * ranks.sizes / recipe.devices
    elements, kinds = parameters_of(sections), [_KINDS[each] for each in keepings]
    workspace = np.array([size.workspace_bytes for size in sections.values()], dtype=float)

    def each_kind(of: Callable[[SectionSizes, str, Recipe], float]) -> Floats:
        return np.array([[of(size, name, kind) for kind in kinds] for name, size in sections.items()], dtype=float)

    kept, held = each_kind(held_bytes), np.minimum(ranks.held, micro_batches)[:, None]
    passing = held * (ranks.counts @ kept) + ranks.present.largest(each_kind(working_bytes))
    if any(each.offload != "none" for each in keepings):
        away = each_kind(away_bytes)
        passing += np.minimum(2.0 * ranks.present.largest(away), held * (ranks.counts @ away))
    states, updates = (parameters * (ranks.counts @ elements)[:, :, None]).sum(axis=1).T
    floors = states[:, None] + np.maximum(passing, updates[:, None])
    least = np.maximum.reduceat(floors, ranks.first).min(axis=0)
    if whole is not None and len(ranks.uneven):
        each, both = (rates[ranks.uneven] @ elements.T for rates in (parameters[..., 0], parameters.sum(axis=2)))
        ranks_of, micro = ranks.sizes[ranks.uneven], micro_batches[ranks.uneven]
        uneven = _uneven_floors(whole, each, kept, ranks_of, micro) + workspace.min()
        uneven = np.maximum(uneven, (both @ whole / ranks_of)[:, None])
        least = np.minimum(least, uneven.min(axis=0))
    return whole_bytes(least)


def _uneven_floors(whole: Floats, states: Floats, kept: Floats, sizes: Floats, micro_batches: Floats) -> Floats:
    """Bounds where blocks are shared out in any way (see the module's docstring), [sizes, keepings].

    Args:
        whole: how often the model has each section, [sections].
        states, kept: bytes of a section, [sizes, sections], and for a micro-batch, [sections, keepings].
        sizes, micro_batches: ranks of each pipeline, and how many micro-batches it runs, [sizes].
    """
    state, keeps = (states @ whole)[..., None], whole @ kept
    ranks = np.arange(sizes.max())
    held = np.minimum(sizes[:, None] - ranks, micro_batches[:, None])
    weights = 1.0 / (state[:, None] + np.maximum(held, 0.0)[..., None] * keeps)
    total = (weights * (held > 0)[..., None]).sum(axis=1)
    most = np.minimum(sizes, micro_batches)[:, None]
    ends = [
        (states[..., None] + turns[..., None] * kept) / (state + turns * keeps)[:, None]
        for turns in (np.minimum(most, 1.0), most)
    ]
    return (whole[:, None] * np.minimum(*ends)).sum(axis=1) / total


def whole_bytes(floors: Floats) -> Floats:
    """Bounds on prices of memory, of which each part is cut to whole bytes."""
    return ROUNDING * floors - _PARTS
