"""Lower bounds on the step and the memory of recipes, from the prices of their sections.

A section takes f seconds forward and b backward for one micro-batch, with exposed communication and recomputation. A
step has m micro-batches. Pipeline rank r has section counts c(r); h(r) counts the sections before its first stage.

1. *Mean.* Some of P ranks has at least the mean work, m sum(f + b) / P. No micro-batch takes less than its forward and
   its gradients of inputs through all stages.
2. *Path of a rank.* Rank r begins behind h(r), each stage handing over in s seconds, and works without a break. The
   last micro-batch's backward passes h(r) again, unless the schedule cuts backwards in two:

       T >= h(r) f + r s + m c(r) (f + b) [ + h(r) b + r s ]

   The ends of the rank with most parameters follow (`price_ends.end_times`). With equal stages this is the price.
3. *Memory.* Each rank holds what a micro-batch keeps on its stages and the state of their parameters: in the mean.

Every bound is less by one part in 10^9, for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.execution import Execution
from autoshard.ir.runtime import Runtime
from cost_models.hardware import Cluster
from cost_models.schedule_orders import most_in_flight
from passes.search.layers.fold_program import AFTER, BEFORE
from passes.search.layers.price_layers import SectionPrice, SectionSizes
from passes.search.pipeline_stages import cuts_backward, rank_sections, share_out
from passes.search.price_memory import (
    again_bytes,
    gathered_bytes,
    is_offloaded,
    kept_bytes,
    state_bytes,
    update_bytes,
)
from passes.search.price_recipe import section_time
from passes.search.recipe_groups import Groups
from passes.search.recipe_space import Pipe

Floats = NDArray[np.float64]
ROUNDING = 1.0 - 1e-9


class SectionTable(NamedTuple):
    """Sections under a recipe, for one micro-batch, in the order of their names, [sections].

    Args:
        forward, backward: seconds; backward with what is recomputed.
        first: the part of `backward` that stages before wait for.
        dense, expert: parameters, see `price_ends.EndLoad`.
    """

    forward: Floats
    backward: Floats
    first: Floats
    dense: Floats
    expert: Floats


def section_table(
    sections: Mapping[str, SectionPrice], recipe: Execution, groups: Groups, cluster: Cluster
) -> SectionTable:
    """The table of a recipe's sections."""
    rows = []
    for name, price in sections.items():
        is_block = name not in (BEFORE, AFTER)
        time = section_time(price, recipe, groups, cluster, is_block=is_block)
        backward = time.backward_s + time.recompute_s
        first = min(backward, time.input_gradient_s + time.recompute_s)
        rows.append((time.forward_s, backward, first, price.parameters, price.expert_parameters))
    return SectionTable(*np.array(rows, dtype=float).T)


@dataclass(frozen=True, slots=True)
class Places:
    """Places of sections in pipelines of as many ranks.

    Args:
        counts: how often each rank has each section, [pipes, ranks, sections].
        before: how often sections come before the rank's first stage, [pipes, ranks, sections].
        is_whole: whether the schedule does not cut backwards in two, [pipes, 1].
    """

    counts: Floats
    before: Floats
    is_whole: NDArray[np.bool_]


@lru_cache(maxsize=1024)
def places_of(names: tuple[str, ...], blocks: tuple[str, ...], pipes: tuple[Pipe, ...]) -> Places:
    """The places of sections, in the order of `names`, in pipelines of a model with some blocks."""
    counts, before, is_whole = zip(*(_place(names, blocks, pipe) for pipe in pipes), strict=True)
    return Places(np.array(counts, dtype=float), np.array(before, dtype=float), np.array(is_whole)[:, None])


@lru_cache(maxsize=8192)
def _place(names: tuple[str, ...], blocks: tuple[str, ...], pipe: Pipe) -> tuple[Floats, Floats, bool]:
    """The entries of `Places` of one pipeline."""
    recipe = pipe.recipe(len(blocks))
    stages = share_out(blocks, recipe)
    ranks = [_row(names, held) for held in rank_sections(stages, recipe)]
    passed = np.cumsum([_row(names, {}), *(_row(names, dict(stage.sections)) for stage in stages)], axis=0)
    return np.array(ranks), passed[: pipe.pipeline], not cuts_backward(recipe)


def _row(names: tuple[str, ...], counts: Mapping[str, int]) -> list[int]:
    return [counts.get(name, 0) for name in names]


def path_times(table: SectionTable, places: Places, send_s: float, micro_batches: int) -> Floats:
    """Seconds of the longest path of a rank before its ends, [pipes]."""
    hops = np.arange(float(places.counts.shape[1])) * send_s
    entering = places.before @ table.forward + hops
    leaving = places.is_whole * (places.before @ table.backward + hops)
    work = places.counts @ (table.forward + table.backward)
    return (entering + micro_batches * work + leaving).max(axis=1)


@lru_cache(maxsize=4096)
def held_by(pipes: tuple[Pipe, ...], micro_batches: int) -> Floats:
    """Micro-batches that each rank holds of each of its stages at its peak, [pipes, ranks]."""
    held = [most_in_flight(pipe.chosen_schedule, pipe.pipeline, micro_batches, pipe.virtual_stages) for pipe in pipes]
    return np.array(held) / np.array([[pipe.virtual_stages] for pipe in pipes])


def memory_floors(
    sizes: Mapping[str, SectionSizes], places: Places, held: Floats, recipe: Execution, groups: Groups
) -> Floats:
    """Bounds on the memory of a recipe's fullest rank in each of some pipelines, [pipes]: its price but for rounding.

    Args:
        sizes: of the recipe's sections.
        places: of the sections in the pipelines.
        held: micro-batches at the peak, see `held_by`.
        recipe: whose pipeline does not count.
        groups: of the recipe.
    """
    shards = (groups.zero.size, groups.expert_replicas.size)
    rows = []
    for name, size in sizes.items():
        kept, is_away = kept_bytes(size, name, recipe), is_offloaded(name, recipe)
        parameters = (size.parameters, size.expert_parameters)
        state, update = (
            sum(each(count, ranks, recipe) for count, ranks in zip(parameters, shards, strict=True))
            for each in (_state_bytes, update_bytes)
        )
        gathered = gathered_bytes(size, recipe) if recipe.zero == 3 and name not in (BEFORE, AFTER) else 0.0
        working = size.workspace_bytes + again_bytes(size, name, recipe)
        rows.append((0 if is_away else kept, kept if is_away else 0, state, update, gathered, working))
    kept, away, state, update, gathered, working = np.array(rows, dtype=float).T
    is_there = places.counts > 0
    passing = held * (places.counts @ kept) + (is_there * gathered).max(axis=2) + (is_there * working).max(axis=2)
    if recipe.offload == "activations":
        passing += np.minimum(2 * (is_there * away).max(axis=2), held * (places.counts @ away))
    ranks = places.counts @ state + np.maximum(passing, places.counts @ update)
    return ROUNDING * ranks.max(axis=1) - _PARTS


def _state_bytes(elements: float, shards: float, recipe: Execution) -> float:
    return sum(state_bytes(elements, shards, recipe).values())


def mean_memory(sizes: Mapping[str, SectionSizes], counts: Floats, first: Execution, most: int, zero: int) -> float:
    """Bound on the memory of all recipes of a layout and activation policy, bytes: the mean of ranks.

    Args:
        sizes: of its sections.
        counts: how often the model has each section, [sections].
        first: the recipe of the layout with the fewest pipeline ranks.
        most: pipeline ranks at most; each rank holds one micro-batch at least.
        zero: the ZeRO stage that shards most of those that recipes may have.
    """
    held = np.array([
        (0 if is_offloaded(name, first) else kept_bytes(size, name, first), size.parameters, size.expert_parameters)
        for name, size in sizes.items()
    ])  # fmt: skip
    kept, dense, expert = counts @ held
    alike = (first.offload, first.recompute, first.micro_batches > 1)
    copies, shared = (
        _each_bytes(shards, zero, first.runtime, first.precision, first.optimizer, *alike) for shards in (math.inf, 1.0)
    )
    split = most / first.devices * (first.tensor * dense + first.expert * first.expert_tensor * expert)
    state = copies * (dense + expert) + (shared - copies) * split
    workspace = min(size.workspace_bytes for size in sizes.values())
    return ROUNDING * (float(kept + state) / most + workspace) - _PARTS


@lru_cache(maxsize=1024)
def _each_bytes(
    shards: float,
    zero: int,
    runtime: Runtime,
    precision: str,
    optimizer: str,
    offload: str,
    recompute: str,
    several: bool,
) -> float:
    """Bytes of a parameter with its state, over so many shards."""
    recipe = Execution(
        zero=zero, runtime=runtime, precision=precision, optimizer=optimizer, offload=offload, recompute=recompute,
        global_batch=1 + several,
    )  # fmt: skip
    return sum(state_bytes(1.0, shards, recipe).values())


_PARTS = 8
"""Parts of memory at most, each cut to whole bytes, see `passes.search.price_memory`."""
