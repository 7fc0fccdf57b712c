"""What a pipeline rank does once per step: gradients are reduced, parameters updated, and gathered."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir.execution import Execution
from cost_models.collectives import all_gather_time, all_reduce_time, reduce_scatter_time
from cost_models.compute import memory_time
from cost_models.hardware import Cluster
from cost_models.step import StepModel
from passes.recipes import own_runtime
from passes.recipes.recipe_groups import Groups, in_pieces

GRADIENT_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
WEIGHT_BYTES = {"bf16": 2, "f16": 2, "f8": 2, "f32": 4}


def gradient_bytes(recipe: Execution) -> int:
    """Bytes of an element of a gradient that is reduced."""
    return (
        own_runtime.at_rest_bytes(recipe) if recipe.runtime.compiled else GRADIENT_BYTES[recipe.runtime.gradient_dtype]
    )


def exchanged_bytes(recipe: Execution) -> int:
    """Bytes of an element of a parameter that is gathered: ZeRO-3 gathers what products read."""
    if not recipe.runtime.compiled:
        return 2
    cast = own_runtime.cast_bytes(recipe) if recipe.zero == 3 else 0
    return cast or own_runtime.at_rest_bytes(recipe)


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Parameters of a pipeline rank, and its time for each micro-batch.

    Args:
        dense, expert: elements of its parameters outside of experts, and in them.
        tensors: how many parameters there are.
        forward_s, backward_s: seconds of a micro-batch.
        last: elements whose gradients the backward makes last.
    """

    dense: float
    expert: float
    tensors: int
    forward_s: float
    backward_s: float
    last: float


@dataclass(frozen=True, slots=True)
class EndWork:
    """Seconds of what a pipeline rank does once per step, each alone."""

    reduce_s: float
    gather_s: float
    update_s: float


def end_work(
    dense: float, expert: float, tensors: int, recipe: Execution, groups: Groups, cluster: Cluster, model: StepModel
) -> EndWork:
    """Reducing gradients, gathering parameters, and updating them, of a rank with so many; see `RankLoad`."""
    reduce_s, gather_s = exchange_times(dense, expert, recipe, groups, cluster, model)
    shards = groups.zero.size if recipe.zero else 1
    elements = dense / shards + expert / (groups.expert_replicas.size if recipe.zero else 1)
    moved = elements * update_bytes(recipe)
    if recipe.runtime.compiled:
        moved += dense * own_runtime.end_copies(groups.zero.size, recipe)
        moved += expert * own_runtime.end_copies(groups.expert_replicas.size, recipe)
    update_s = memory_time(moved, cluster.device) * model.memory_slowdown
    if recipe.runtime.compiled:
        update_s += tensors * cluster.device.launch_latency_s
    return EndWork(reduce_s, gather_s, update_s)


def end_times(
    load: RankLoad, recipe: Execution, groups: Groups, cluster: Cluster, model: StepModel
) -> dict[str, float]:
    """Seconds that a pipeline rank waits once per step: its ends, beside its last backward and its first forward.

    In our own runtime nothing runs beside the reduction of those gradients that a backward makes last.
    """
    work = end_work(load.dense, load.expert, load.tensors, recipe, groups, cluster, model)
    reduce_s, gather_s = work.reduce_s, work.gather_s
    if recipe.reduces_late:
        return {"optimizer": work.update_s, **_late(work, recipe, model)}
    if recipe.runtime.overlap_gradients:
        alone_s = reduce_s * load.last / max(1.0, load.dense + load.expert) if recipe.runtime.compiled else 0.0
        reduce_s = model.beside(load.backward_s, reduce_s - alone_s) - load.backward_s + alone_s
    if recipe.runtime.overlap_parameters:
        beside_s = work.update_s if recipe.runtime.compiled else load.forward_s
        gather_s = model.beside(beside_s, gather_s) - beside_s
    return {"gradient reduction": reduce_s, "parameter gathering": gather_s, "optimizer": work.update_s}


def _late(work: EndWork, recipe: Execution, model: StepModel) -> dict[str, float]:
    """What is waited for of reducing and gathering that both run beside the update."""
    sent_s = work.reduce_s + work.gather_s
    if not sent_s:
        return {}
    waited_s = model.beside(work.update_s, sent_s) - work.update_s if recipe.runtime.overlap_gradients else sent_s
    parts = {"gradient reduction": work.reduce_s, "parameter gathering": work.gather_s}
    return {name: waited_s * seconds / sent_s for name, seconds in parts.items()}


def exchange_times(
    dense: float, expert: float, recipe: Execution, groups: Groups, cluster: Cluster, model: StepModel
) -> tuple[float, float]:
    """Seconds of reducing gradients, and of gathering updated parameters, of `dense` and `expert` elements.

    What each micro-batch did (`price_recipe.sharded_time`) is not done again.
    """
    gradient = gradient_bytes(recipe)
    reduce_s = gather_s = 0.0
    if recipe.zero in (1, 2):
        weight = exchanged_bytes(recipe)
        gather_s = in_pieces(all_gather_time, dense * weight, groups.zero, recipe, cluster, model)
        if expert:
            gather_s += in_pieces(all_gather_time, expert * weight, groups.expert_replicas, recipe, cluster, model)
    if recipe.reduces_each:
        return reduce_s, gather_s
    if recipe.zero and (recipe.runtime.compiled or groups.zero.size == groups.replicas.size):
        reduce_s = in_pieces(reduce_scatter_time, dense * gradient, groups.zero, recipe, cluster, model)
        reduce_s += in_pieces(
            all_reduce_time, dense * gradient / groups.zero.size, groups.outer, recipe, cluster, model
        )
    else:
        reduce_s = in_pieces(all_reduce_time, dense * gradient, groups.replicas, recipe, cluster, model)
    if expert:
        exchange = reduce_scatter_time if recipe.zero else all_reduce_time
        reduce_s += in_pieces(exchange, expert * gradient, groups.expert_replicas, recipe, cluster, model)
    return reduce_s, gather_s


_STATE_PASSES = {"sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2}


def update_bytes(recipe: Execution) -> float:
    """Bytes that the optimizer moves for each element: state and master weight read and written, gradient read, the
    parameter written."""
    if recipe.runtime.compiled:
        return own_runtime.update_bytes(recipe)
    state = 8 * _STATE_PASSES[recipe.optimizer]
    master = 8 if recipe.runtime.master_weights else 2
    clipping = GRADIENT_BYTES[recipe.runtime.gradient_dtype]
    once = state + master + GRADIENT_BYTES[recipe.runtime.gradient_dtype] + 2
    return (once if recipe.runtime.fused else UNFUSED_UPDATE * once) + clipping


UNFUSED_UPDATE = 3
"""How often an optimizer that runs operator by operator moves what a fused one moves once: AdamW's decay, two moments,
denominator and update are about 90 bytes an element in place of 30 (torch.optim, for-each implementation)."""
