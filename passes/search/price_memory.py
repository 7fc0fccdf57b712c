"""Peak memory of a rank under a recipe: state that lies in memory all the time, and values that live during a step.

* Parameters, gradients and optimizer state are sharded by the recipe's ZeRO stage. Under ZeRO-3 the shard of a
  parameter is its master weight, and the weights of two blocks are gathered at a time.
* Activations are the values that each micro-batch in flight keeps for its backward. Selective recomputation keeps all
  values but those of attention's core. Full recomputation keeps the inputs of each block, and all values of the one
  block whose backward runs.
* Offloaded activations lie on the host. Buffers on the device hold the values of two blocks: a block whose values are
  copied, and its neighbour.
* The optimizer's update may copy gradients to float32 for master weights. The copy replaces the activations, and
  counts if it is larger.
* Workspace is the largest sum of bytes that one kernel reads and writes, without values that are kept anyway. Only one
  layer class at a time needs workspace and memory for recomputed values.

All ranks of a pipeline, and many pipelines of a search, are computed in one call: arrays are [..., ranks, classes].
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
    """Peak memory of the rank that needs most: bytes of each kind of value, such as "activations"."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Peak memory of the rank that needs most, in bytes, over all kinds of values."""
        return sum(self.parts.values())


class HeldBytes(NamedTuple):
    """Bytes on one rank of one layer of each class, as arrays [classes].

    Args:
        kept: activations of one micro-batch that stay on the device for the backward.
        offloaded: activations of one micro-batch that are offloaded to the host.
        parameters, gradients, state: parameters, gradients and optimizer state, each in memory all the time.
        gathered: weights of a block and its neighbour, which ZeRO-3 has gathered.
        recomputed: values that are recomputed while the layer runs backward.
        workspace: memory of the layer's largest kernel.
        update: the float32 copy of gradients that updates master weights.
    """

    kept: Floats
    offloaded: Floats
    parameters: Floats
    gradients: Floats
    state: Floats
    gathered: Floats
    recomputed: Floats
    workspace: Floats
    update: Floats


def held_bytes(sizes: Mapping[str, LayerPrice], recipe: Execution, groups: Groups) -> HeldBytes:
    """Return the bytes on one rank of one layer of each class under a recipe, in the order of `sizes`."""
    rows = []
    widens = recipe.runtime.master_weights and recipe.runtime.gradient_dtype != "f32"
    for name, size in sizes.items():
        is_block = name not in (BEFORE, AFTER)
        kept = kept_bytes(size, recipe, is_block=is_block)
        is_offloaded = is_block and recipe.offload == "activations"
        shared = (
            (size.trained, size.frozen, groups.zero.size),
            (size.trained_experts, size.frozen_experts, groups.expert_replicas.size),
        )
        states = [state_bytes(*numbers, recipe).values() for numbers in shared]
        update = sum(4.0 * trained / (ranks if recipe.zero else 1) for trained, _, ranks in shared) if widens else 0.0
        gathered = 2 * WEIGHT_BYTES[recipe.precision] * (size.parameters + size.expert_parameters)
        recomputed = {"none": 0, "selective": size.core_bytes, "full": size.saved_bytes}[recipe.recompute]
        rows.append((
            *((0, kept) if is_offloaded else (kept, 0)), *map(sum, zip(*states, strict=True)),
            gathered if is_block and recipe.zero == 3 else 0, recomputed if is_block else 0, size.workspace_bytes,
            update,
        ))  # fmt: skip
    return HeldBytes(*np.array(rows, dtype=float).T)


def memory_parts(held: HeldBytes, counts: Floats, in_flight: Floats) -> dict[str, Floats]:
    """Return the bytes at the peak of each pipeline rank, by kind of value such as "activations", [..., ranks].

    Args:
        held: the bytes of one layer of each class.
        counts: the number of layers of each class on each rank, [..., ranks, classes].
        in_flight: the number of micro-batches that each stage of a rank holds at the rank's peak, [..., ranks].
    """

    def most(each: Floats) -> Floats:
        return (is_there * each).max(axis=-1)

    is_there = counts > 0
    heaviest = (is_there * (1 + held.recomputed + held.workspace)).argmax(axis=-1)
    passing = {
        "activations": in_flight * (counts @ held.kept),
        "offload buffers": np.minimum(2 * most(held.offloaded), in_flight * (counts @ held.offloaded)),
        "recomputed activations": held.recomputed[heaviest],
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
    """Return the peak memory of the pipeline rank that needs most.

    Args:
        in_flight: for each pipeline rank, the number of micro-batches that each of its stages holds at the peak.
    """
    counts = rank_counts(tuple(sizes), stages, recipe)
    parts = memory_parts(held_bytes(sizes, recipe, groups), counts, np.array(in_flight))
    fullest = int(np.sum(list(parts.values()), axis=0).argmax())
    return MemoryPrice({name: int(size[fullest]) for name, size in parts.items() if int(size[fullest])})


def host_bytes(
    sizes: Mapping[str, LayerPrice], stages: Sequence[Stage], recipe: Execution, in_flight: Sequence[float]
) -> int:
    """Return the bytes of offloaded activations in the host's memory, for the rank that offloads most.

    `in_flight` is the number of micro-batches that each stage of a rank holds at the peak, by pipeline rank.
    """
    if recipe.offload != "activations":
        return 0
    blocks = [name for name in sizes if name not in (BEFORE, AFTER)]
    kept = np.array([kept_bytes(sizes[name], recipe, is_block=True) for name in blocks], dtype=float)
    return int((np.array(in_flight) * (rank_counts(blocks, stages, recipe) @ kept)).max())


def state_bytes(trained: Any, frozen: Any, shards: Any, recipe: Execution) -> dict[str, Any]:
    """Return the bytes of "parameters", "gradients" and "optimizer state" on one rank.

    `trained` and `frozen` are the numbers of parameters with and without gradients, before ZeRO shards them over
    `shards` ranks. They may be numbers, arrays or symbols.

    Below ZeRO-3, a copy of each float32 master weight in `recipe.precision` counts too, if the runtime has
    `narrow_copies` or there is no pipeline. Without a pipeline, the search over specs may shard a parameter further
    than the recipe says, and gather this copy. In a pipeline the copy would be gathered for each micro-batch. Frozen
    parameters have master weights only with `frozen_masters`.
    """
    weight, gradient = WEIGHT_BYTES[recipe.precision], GRADIENT_BYTES[recipe.runtime.gradient_dtype]
    has_masters = recipe.runtime.master_weights
    has_copies = has_masters and recipe.zero < 3 and (recipe.runtime.narrow_copies or recipe.pipeline == 1)
    extra = 2 if recipe.runtime.separate_sum and gradient > 2 else 0
    moments = (4 if has_masters else weight) * MOMENTS[recipe.optimizer]
    master = 4 if has_copies else 0
    wide = 4 if has_masters and not has_copies else weight
    of_frozen = (wide, master) if recipe.runtime.frozen_masters else (weight, 0)
    on_device = 0.0 if recipe.offload in ("optimizer", "parameters") else 1.0
    return {
        "parameters": (trained * wide + frozen * of_frozen[0]) / (shards if recipe.zero == 3 else 1),
        "gradients": trained * (gradient + extra) / (shards if recipe.zero >= 2 else 1),
        "optimizer state": on_device
        * (trained * (moments + master) + frozen * of_frozen[1])
        / (shards if recipe.zero >= 1 else 1),
    }


def kept_bytes(price: LayerPrice, recipe: Execution, *, is_block: bool) -> int:
    """Return the bytes of activations that one layer keeps for the backward of one micro-batch, on device or host."""
    if recipe.recompute == "none" or not is_block:
        return price.saved_bytes
    return price.entering_bytes if recipe.recompute == "full" else price.saved_bytes - price.core_bytes
