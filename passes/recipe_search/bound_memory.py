"""Lower bounds on the memory of recipes, from what sections keep and hold.

Rank r of P holds P - r micro-batches of each of its stages at its peak, or all that there are, or more, whatever the
schedule and its virtual stages; under "zbv" that is so with ranks counted from the other end. So where the stages of
ranks are known, so is a bound; and the least of all pipelines bounds a layout, before anything is priced.

Where blocks are shared out in any way, with one stage on each of P ranks, rank r holds h(r) >= min(P - r, m)
micro-batches and has n(r, k) of the N(k) sections k, each with state s(k) and, for a micro-batch, q(k). So the greatest
memory M has

    M >= sum_k n(r, k) (s(k) + h(r) q(k))  for all r,
    Z M >= sum_k N(k) min_r (s(k) + h(r) q(k)) / (S + h(r) Q)

with S = sum N s, Q = sum N q, Z = sum_r 1 / (S + h(r) Q): the rows are added with weights 1 / (S + h(r) Q). Each term
of the minimum rises or falls with h(r), so its ends are enough.

Every bound is taken less one part in 10^9, and a byte for each part, for rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.recipe import Recipe
from passes.recipe_search.bound_recipes import ROUNDING, Floats
from passes.recipe_search.known_pipes import may_be_uneven
from passes.recipe_search.pipe_shapes import PipeShapes, even_counts
from passes.recipe_search.recipe_space import KEEPINGS, Keeping
from passes.recipes.price_memory import is_offloaded, kept_bytes, state_bytes
from passes.recipes.recipe_groups import Groups
from passes.sections.fold_program import AFTER, BEFORE
from passes.sections.price_sections import SectionSizes

_PARTS = 8
"""Parts of memory at most, see `passes.recipes.price_memory`."""

_KINDS = {keeping: Recipe(recompute=keeping.recompute, offload=keeping.offload) for keeping in KEEPINGS}


def memory_floors(shapes: PipeShapes, states: Floats, passing: Floats) -> Floats:
    """Bounds on the memory of the fullest rank of each pipeline, bytes: all but what the update needs.

    Args:
        shapes: of the pipelines.
        states: bytes of each section's parameters with gradients and state, [shardings, sections].
        passing: bytes of all else on each rank, see `passing_bytes`, [pipes, ranks].

    Returns:
        [shardings, pipes].
    """
    pipes, ranks, sections = shapes.counts.shape
    held = (shapes.counts.reshape(-1, sections) @ states.T).reshape(pipes, ranks, -1)
    return whole_bytes((held + passing[..., None]).max(axis=1)).T


def rank_floors(
    sections: Mapping[str, SectionSizes], counts: Floats, held: Floats, states: Floats, recipe: Recipe
) -> Floats:
    """Bounds on the memory of ranks that have sections so often, bytes: all but what the update needs.

    Args:
        sections: what they keep and hold.
        counts: how often each rank has each section, [..., sections].
        held: micro-batches that each rank holds at its peak, [...].
        states: bytes of each section's parameters with gradients and state, [sections].
        recipe: what is kept.
    """
    return whole_bytes(counts @ states + passing_bytes(sections, counts, held, recipe))


def passing_bytes(sections: Mapping[str, SectionSizes], counts: Floats, held: Floats, recipe: Recipe) -> Floats:
    """What such ranks hold but for parameters, gradients and state, bytes, at least; arguments as of `rank_floors`."""

    def largest(values: Iterable[float]) -> Floats:
        return ((counts > 0) * np.array(list(values), dtype=float)).max(axis=-1)

    passing = held * (counts @ section_kept(sections, recipe))
    passing += largest(again_bytes(price, name, recipe.recompute) for name, price in sections.items())
    passing += largest(buffer_bytes(price, name, recipe) for name, price in sections.items())
    passing += largest(price.workspace_bytes for price in sections.values())
    return passing


def section_states(sections: Mapping[str, SectionSizes], recipe: Recipe, groups: Groups) -> Floats:
    """Bytes of sections' parameters with gradients and state, shared out over groups, [sections]."""
    dense, expert = (
        sum(state_bytes(1.0, shards, recipe).values()) for shards in (groups.zero.size, groups.expert_replicas.size)
    )
    return states_of(sections, dense, expert)


def states_of(sections: Mapping[str, SectionSizes], dense: float, expert: float) -> Floats:
    """The same where each parameter takes so many, and each of experts, [sections]."""
    return np.array([dense * size.parameters + expert * size.expert_parameters for size in sections.values()])


def section_kept(sections: Mapping[str, SectionSizes], recipe: Recipe) -> Floats:
    """Bytes that a micro-batch keeps of sections, [sections]."""
    return np.array([held_bytes(size, name, recipe) for name, size in sections.items()], dtype=float)


def uneven_memory_floors(
    sections: Mapping[str, SectionSizes], whole: Floats, held: Floats, states: Floats, recipe: Recipe
) -> Floats:
    """Bounds on the memory of the fullest rank however blocks are shared out, bytes; see the module's docstring.

    Args:
        sections: what they keep and hold.
        whole: how often the model has each, [sections].
        held: h(r), micro-batches that each rank holds at its peak, by schedule, [pipes, ranks].
        states: see `memory_floors`, [shardings, sections].
        recipe: what is kept.

    Returns:
        [shardings, pipes].
    """
    kept, held = section_kept(sections, recipe), held[..., None]
    states = states[:, None, None]
    each = states + held * kept
    weights = 1.0 / (each @ whole)
    least = (weights[..., None] * each).min(axis=2)
    workspace = min(size.workspace_bytes for size in sections.values())
    return whole_bytes((least @ whole) / weights.sum(axis=2) + workspace)


@dataclass(frozen=True, slots=True)
class PipeRanks:
    """The ranks of pipelines of several sizes, one pipeline after the other.

    Without those that have no more of any section than one before them, which holds as many micro-batches or more.

    Args:
        counts: how often each rank has each section, [ranks of all, sections].
        held: micro-batches that each holds if there are so many, at least, [ranks of all].
        sizes: ranks of its pipeline, [ranks of all].
        first: where each pipeline begins, [pipes].
        uneven: the same of one pipeline of each size over which blocks may be shared out unevenly.
    """

    counts: Floats
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
    return PipeRanks(
        np.concatenate([counts for _, counts, _ in pipes]),
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


def again_bytes(size: SectionSizes, name: str, recompute: str) -> int:
    """Bytes that a section keeps while its backward runs, where they are computed again."""
    if name in (BEFORE, AFTER):
        return 0
    return {"none": 0, "selective": size.core_bytes, "full": size.saved_bytes}[recompute]


def held_bytes(size: SectionSizes, name: str, recipe: Recipe) -> int:
    """Bytes that a micro-batch keeps of a section on the device."""
    return 0 if is_offloaded(name, recipe) else kept_bytes(size, name, recipe)


def buffer_bytes(size: SectionSizes, name: str, recipe: Recipe) -> int:
    """Bytes of a section that lie on the device while they go to the host, at least."""
    return kept_bytes(size, name, recipe) if is_offloaded(name, recipe) else 0


def layout_memory_floors(
    sections: Mapping[str, SectionSizes],
    ranks: PipeRanks,
    recipe: Recipe,
    states: tuple[Floats, Floats],
    keepings: Sequence[Keeping],
    *,
    whole: Floats | None,
) -> Floats:
    """Bounds on the memory of the recipes of a layout, by what becomes of blocks' values, bytes.

    Args:
        sections: what they keep and hold.
        ranks: of the pipelines that the recipes have.
        recipe: one of the recipes.
        states: bytes of a parameter with its gradient and state on each rank, and of one of experts, [ranks of all].
        keepings: what may become of blocks' values.
        whole: how often the model has each section, [sections], where blocks may be shared out unevenly; else None.

    Returns:
        [keepings].
    """
    micro_batches = recipe.batch / recipe.micro_batch * recipe.context * recipe.tensor * ranks.sizes / recipe.devices
    dense, expert, workspace = (
        np.array([getattr(size, name) for size in sections.values()], dtype=float)
        for name in ("parameters", "expert_parameters", "workspace_bytes")
    )
    kinds = [_KINDS[each] for each in keepings]
    kept = np.array([[held_bytes(size, name, kind) for kind in kinds] for name, size in sections.items()], dtype=float)
    again = [[again_bytes(size, name, kind.recompute) for kind in kinds] for name, size in sections.items()]
    held, has = np.minimum(ranks.held, micro_batches), ranks.counts > 0
    passing = held[:, None] * (ranks.counts @ kept)
    passing += (has[:, :, None] * np.array(again, dtype=float)).max(axis=1)
    if any(each.offload != "none" for each in keepings):
        buffers = [[buffer_bytes(size, name, kind) for kind in kinds] for name, size in sections.items()]
        passing += (has[:, :, None] * np.array(buffers, dtype=float)).max(axis=1)
    held_states = states[0] * (ranks.counts @ dense) + states[1] * (ranks.counts @ expert)
    floors = passing + (held_states + (has * workspace).max(axis=1))[:, None]
    least = np.maximum.reduceat(floors, ranks.first).min(axis=0)
    if whole is not None and len(ranks.uneven):
        dense_state, expert_state = (values[ranks.uneven, None] for values in states)
        each = dense_state * dense + expert_state * expert
        sizes, micro = ranks.sizes[ranks.uneven], micro_batches[ranks.uneven]
        uneven = _uneven_floors(whole, each, kept, sizes, micro) + workspace.min()
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
