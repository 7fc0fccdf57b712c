"""Lower bounds on the step of recipes, from the prices of their layer classes.

A layer class takes f seconds forward and b backward for one micro-batch, with exposed communication and recomputation.
A step has m micro-batches. Pipeline rank r has counts c(r) of each class; h(r) counts those before its first stage.

1. *Mean.* Some of P ranks has at least the mean work, m sum(f + b) / P. No micro-batch takes less than its forward and
   its gradients of inputs through all stages.
2. *Path of a rank.* Rank r begins behind h(r), each stage handing over in s seconds, and works without a break. The
   last micro-batch's backward passes h(r) again, unless the schedule cuts backwards in two:

       T >= h(r) f + r s + m c(r) (f + b) [ + h(r) b + r s ]

   The ends of the rank with most parameters follow (`price_ends.end_times`). With equal stages this is the price.

Every bound is less by one part in 10^9, for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.execution import Execution
from cost_models.hardware import Cluster
from cost_models.schedule_orders import most_in_flight
from passes.search.layers.fold_program import AFTER, BEFORE
from passes.search.layers.price_layers import LayerPrice
from passes.search.pipeline_stages import Floats, cuts_backward, layer_counts, rank_counts, share_out
from passes.search.price_recipe import layer_time
from passes.search.recipe_groups import Groups
from passes.search.recipe_space import Pipe

ROUNDING = 1.0 - 1e-9


class LayerTable(NamedTuple):
    """Layer classes under a recipe, for one micro-batch, in the order of their names, [classes].

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


def layer_table(layers: Mapping[str, LayerPrice], recipe: Execution, groups: Groups, cluster: Cluster) -> LayerTable:
    """The table of a recipe's layer classes."""
    rows = []
    for name, price in layers.items():
        is_block = name not in (BEFORE, AFTER)
        time = layer_time(price, recipe, groups, cluster, is_block=is_block)
        backward = time.backward_s + time.recompute_s
        first = min(backward, time.input_gradient_s + time.recompute_s)
        rows.append((time.forward_s, backward, first, price.parameters, price.expert_parameters))
    return LayerTable(*np.array(rows, dtype=float).T)


@dataclass(frozen=True, slots=True)
class Places:
    """Places of layer classes in pipelines of as many ranks.

    Args:
        counts: how often each rank has each layer class, [pipes, ranks, classes].
        before: how often layer classes come before the rank's first stage, [pipes, ranks, classes].
        is_whole: whether the schedule does not cut backwards in two, [pipes, 1].
    """

    counts: Floats
    before: Floats
    is_whole: NDArray[np.bool_]


@lru_cache(maxsize=1024)
def places_of(names: tuple[str, ...], blocks: tuple[str, ...], pipes: tuple[Pipe, ...]) -> Places:
    """The places of layer classes, in the order of `names`, in pipelines of a model with some blocks."""
    counts, before, is_whole = zip(*(_place(names, blocks, pipe) for pipe in pipes), strict=True)
    return Places(np.array(counts, dtype=float), np.array(before, dtype=float), np.array(is_whole)[:, None])


@lru_cache(maxsize=8192)
def _place(names: tuple[str, ...], blocks: tuple[str, ...], pipe: Pipe) -> tuple[Floats, Floats, bool]:
    """The entries of `Places` of one pipeline."""
    recipe = pipe.recipe(len(blocks))
    stages = share_out(blocks, recipe)
    passed = np.cumsum([layer_counts(names, stage.layers) for stage in stages], axis=0)
    before = np.concatenate([np.zeros((1, len(names))), passed])[: pipe.pipeline]
    return rank_counts(names, stages, recipe), before, not cuts_backward(recipe)


def path_times(table: LayerTable, places: Places, send_s: float, micro_batches: int) -> Floats:
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
