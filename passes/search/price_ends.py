"""Seconds at the end of a step on a pipeline rank: gradients are reduced, parameters updated and gathered."""

from __future__ import annotations

from typing import NamedTuple

from autoshard.ir.execution import Execution
from cost_models.collectives import all_gather_time, all_reduce_time, reduce_scatter_time
from cost_models.compute import memory_time
from cost_models.hardware import Cluster
from cost_models.streams import concurrent_time
from passes.search.recipe_groups import Groups, in_pieces

GRADIENT_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
WEIGHT_BYTES = {"bf16": 2, "f16": 2, "f8": 2, "f32": 4}


class RankLoad(NamedTuple):
    """The load of a pipeline rank.

    Args:
        dense, expert: numbers of its trained parameters before ZeRO shards them, outside of experts and in experts.
        forward_s, backward_s: seconds of the rank's layers for one micro-batch.
    """

    dense: float
    expert: float
    forward_s: float
    backward_s: float


def end_times(load: RankLoad, recipe: Execution, groups: Groups, cluster: Cluster) -> dict[str, float]:
    """Return the seconds that a pipeline rank needs for the end of a step, by part.

    The parts are "gradient reduction", "parameter gathering" and "optimizer". If the runtime overlaps the reduction
    with the last backward, or the gathering with the next forward, only the exposed seconds count.
    """
    reduce_s, gather_s = exchange_times(load.dense, load.expert, recipe, groups)
    if recipe.runtime.overlap_gradients:
        reduce_s = concurrent_time(load.backward_s, reduce_s) - load.backward_s
    if recipe.runtime.overlap_parameters:
        gather_s = concurrent_time(load.forward_s, gather_s) - load.forward_s
    elements = load.dense / groups.zero.size + load.expert / groups.expert_replicas.size
    elements = elements if recipe.zero else load.dense + load.expert
    update_s = memory_time(elements * update_bytes(recipe), cluster.device)
    return {"gradient reduction": reduce_s, "parameter gathering": gather_s, "optimizer": update_s}


def exchange_times(dense: float, expert: float, recipe: Execution, groups: Groups) -> tuple[float, float]:
    """Return the seconds of reducing gradients, and the seconds of gathering updated parameters, once per step.

    `dense` and `expert` are the rank's numbers of trained parameters outside of experts and in experts.
    `price_recipe.sharded_time` has the collectives that run once per micro-batch.
    """
    gradient = GRADIENT_BYTES[recipe.runtime.gradient_dtype]
    reduce_s = gather_s = 0.0
    if recipe.zero in (1, 2):
        weight = WEIGHT_BYTES[recipe.precision]
        gather_s = in_pieces(all_gather_time, dense * weight, groups.zero, recipe)
        if expert:
            gather_s += in_pieces(all_gather_time, expert * weight, groups.expert_replicas, recipe)
    if recipe.reduces_each:
        return reduce_s, gather_s
    if recipe.zero and groups.zero.size == groups.replicas.size:
        reduce_s = in_pieces(reduce_scatter_time, dense * gradient, groups.zero, recipe)
    else:
        reduce_s = in_pieces(all_reduce_time, dense * gradient, groups.replicas, recipe)
    if expert:
        exchange = reduce_scatter_time if recipe.zero else all_reduce_time
        reduce_s += in_pieces(exchange, expert * gradient, groups.expert_replicas, recipe)
    return reduce_s, gather_s


_STATE_PASSES = {"sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2}


def update_bytes(recipe: Execution) -> float:
    """Return the bytes of device memory that the optimizer's update moves for each parameter.

    State and master weight are read and written. The gradient is read twice, once for clipping. The parameter is
    written.
    """
    state = 8 * _STATE_PASSES[recipe.optimizer]
    master = 8 if recipe.runtime.master_weights else 2
    clipping = GRADIENT_BYTES[recipe.runtime.gradient_dtype]
    return state + master + GRADIENT_BYTES[recipe.runtime.gradient_dtype] + 2 + clipping
