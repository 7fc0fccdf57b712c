"""Peak memory of a rank under a recipe: bytes that lie there all the time, and bytes that a step adds.

* Parameters, gradients and optimizer state, each sharded as the ZeRO stage says. Under ZeRO-3 the shard is the master
  weight; two blocks' weights are gathered at a time.
* Activations: the values that each micro-batch in flight keeps for its backward. With full recomputation these are the
  values that enter each block, and a block's own while its backward runs; with selective, all but attention's core.
* Offloaded, the kept values lie on the host, but for those of two blocks: one whose values go or come, and its
  neighbour.
* The update needs gradients in float32, for master weights, in place of activations where it is more.
* Workspace: the most that one kernel reads and writes of values that are not kept. One layer class at a time has it,
  and its recomputed values.

All ranks of a pipeline, and all pipelines of a search, are counted at once: arrays are [..., ranks, classes].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autoshard.ir.execution import Execution
from cost_models.memory import MOMENTS
from passes.search.layers.fold_program import AFTER, BEFORE
from passes.search.layers.price_layers import LayerPrice
from passes.search.pipeline_stages import Floats, Stage, rank_counts
from passes.search.price_ends import GRADIENT_BYTES, WEIGHT_BYTES
from passes.search.recipe_groups import Groups


@dataclass(frozen=True, slots=True)
class MemoryPrice:
    """Bytes of the fullest rank, by part; `total` is their sum."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.parts.values())


class HeldBytes(NamedTuple):
    """Bytes of layer classes under a recipe, [classes].

    Args:
        kept, away: for a micro-batch, on the device and on the host.
        parameters, gradients, state: in memory all the time.
        gathered: weights of a block and its neighbour, gathered by ZeRO-3.
        again, workspace: while the layer class runs backward.
        update: the float32 copy of gradients that updates master weights.
    """

    kept: Floats
    away: Floats
    parameters: Floats
    gradients: Floats
    state: Floats
    gathered: Floats
    again: Floats
    workspace: Floats
    update: Floats


def held_bytes(sizes: Mapping[str, LayerPrice], recipe: Execution, groups: Groups) -> HeldBytes:
    """The bytes of each layer class, in the order of `sizes`."""
    rows = []
    widens = recipe.runtime.master_weights and recipe.runtime.gradient_dtype != "f32"
    for name, size in sizes.items():
        is_block = name not in (BEFORE, AFTER)
        kept = kept_bytes(size, recipe, is_block=is_block)
        is_away = is_block and recipe.offload == "activations"
        shared = ((size.parameters, groups.zero.size), (size.expert_parameters, groups.expert_replicas.size))
        states = [state_bytes(elements, ranks, recipe).values() for elements, ranks in shared]
        update = sum(4.0 * elements / (ranks if recipe.zero else 1) for elements, ranks in shared) if widens else 0.0
        gathered = 2 * WEIGHT_BYTES[recipe.precision] * (size.parameters + size.expert_parameters)
        again = {"none": 0, "selective": size.core_bytes, "full": size.saved_bytes}[recipe.recompute]
        rows.append((
            *((0, kept) if is_away else (kept, 0)), *map(sum, zip(*states, strict=True)),
            gathered if is_block and recipe.zero == 3 else 0, again if is_block else 0, size.workspace_bytes, update,
        ))  # fmt: skip
    return HeldBytes(*np.array(rows, dtype=float).T)


def memory_parts(held: HeldBytes, counts: Floats, in_flight: Floats) -> dict[str, Floats]:
    """Bytes of each pipeline rank by part, [..., ranks].

    Args:
        held: bytes of each layer class.
        counts: number of each layer class on each rank, [..., ranks, classes].
        in_flight: micro-batches that each stage of a rank holds at its peak, [..., ranks].
    """

    def most(each: Floats) -> Floats:
        return (is_there * each).max(axis=-1)

    is_there = counts > 0
    heaviest = (is_there * (1 + held.again + held.workspace)).argmax(axis=-1)
    passing = {
        "activations": in_flight * (counts @ held.kept),
        "offload buffers": np.minimum(2 * most(held.away), in_flight * (counts @ held.away)),
        "recomputed activations": held.again[heaviest],
        "gathered parameters": most(held.gathered),
        "workspace": held.workspace[heaviest],
    }
    update = counts @ held.update
    is_update = update > sum(passing.values())
    return {
        "parameters": counts @ held.parameters,
        "gradients": counts @ held.gradients,
        "optimizer state": counts @ held.state,
        **{name: np.where(is_update, 0.0, size) for name, size in passing.items()},
        "update": np.where(is_update, update, 0.0),
    }


def memory_price(
    sizes: Mapping[str, LayerPrice],
    stages: Sequence[Stage],
    recipe: Execution,
    groups: Groups,
    in_flight: Sequence[float],
) -> MemoryPrice:
    """The memory of the fullest pipeline rank.

    Args:
        sizes: the price of each layer class.
        stages: how often each stage has each layer class.
        recipe: the recipe.
        groups: its groups.
        in_flight: by pipeline rank, micro-batches that each of its stages holds at its peak.
    """
    counts = rank_counts(tuple(sizes), stages, recipe)
    parts = memory_parts(held_bytes(sizes, recipe, groups), counts, np.array(in_flight))
    fullest = int(np.sum(list(parts.values()), axis=0).argmax())
    return MemoryPrice({name: int(size[fullest]) for name, size in parts.items() if int(size[fullest])})


def host_bytes(
    sizes: Mapping[str, LayerPrice], stages: Sequence[Stage], recipe: Execution, in_flight: Sequence[float]
) -> int:
    """Bytes on the host for the rank with most of them, see `memory_price`."""
    if recipe.offload != "activations":
        return 0
    blocks = [name for name in sizes if name not in (BEFORE, AFTER)]
    kept = np.array([kept_bytes(sizes[name], recipe, is_block=True) for name in blocks], dtype=float)
    return int((np.array(in_flight) * (rank_counts(blocks, stages, recipe) @ kept)).max())


def state_bytes(elements: Any, shards: Any, recipe: Execution) -> dict[str, Any]:
    """Bytes of parameters, gradients and optimizer state of `elements` parameters on one rank."""
    weight, gradient = WEIGHT_BYTES[recipe.precision], GRADIENT_BYTES[recipe.runtime.gradient_dtype]
    has_masters = recipe.runtime.master_weights
    has_copies = has_masters and recipe.zero < 3 and (recipe.runtime.narrow_copies or recipe.pipeline == 1)
    extra = 2 if recipe.runtime.separate_sum and gradient > 2 else 0
    state = (4 if has_masters else weight) * MOMENTS[recipe.optimizer] + (4 if has_copies else 0)
    if has_masters and not has_copies:
        weight = 4
    on_device = 0.0 if recipe.offload in ("optimizer", "parameters") else 1.0
    return {
        "parameters": elements * weight / (shards if recipe.zero == 3 else 1),
        "gradients": elements * (gradient + extra) / (shards if recipe.zero >= 2 else 1),
        "optimizer state": on_device * elements * state / (shards if recipe.zero >= 1 else 1),
    }


def kept_bytes(price: LayerPrice, recipe: Execution, *, is_block: bool) -> int:
    """Bytes that a micro-batch keeps of a layer class, on the device or on the host."""
    if recipe.recompute == "none" or not is_block:
        return price.saved_bytes
    return price.entering_bytes if recipe.recompute == "full" else price.saved_bytes - price.core_bytes
