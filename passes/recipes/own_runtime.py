"""What a recipe takes where `autoshard.compile` runs it (`Runtime.compiled`), by the prices of plans of specs.

The lowered program of such a plan is walked for its price (`passes/prediction/walk_program.py`); here is what of that
program all recipes have in common:

* Kernels and collectives take what they take alone. Chains of operators are not fused, and the optimizer is.
* Parameters and optimizer state lie in one type, float32 where the model's products are narrower. What products read is
  cast from it once per step. ZeRO-1 and -2 gather parameters in it, when they are updated.
* Gradients are reduced in it. A step of one micro-batch reduces them beside its backward. A longer one adds them up
  and reduces them beside its update, but for ZeRO-2 and -3.
* ZeRO-3 gathers each parameter once for a micro-batch, unless its block is computed again.
* Gradients of one micro-batch lie where activations lay before.
* Each collective copies what it sends and what it receives (`passes/strategies/price.py`, `StepPrice`).
* Collectives go in buckets of `passes/lowering/bucket_collectives.py`.
* Each parameter is a kernel's launch where it is cast, where its gradient is, and where it is updated.
* A block that is computed again sends less than its forward (`sent_again`).
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir.execution import Execution
from autoshard.ir.runtime import AUTOSHARD, Runtime
from cost_models.hardware import Cluster
from cost_models.memory import MOMENTS
from cost_models.step import StepModel, alone, fitted
from cost_models.streams import overlap_of
from passes.lowering.bucket_collectives import BucketCollectives
from passes.sections.price_sections import AxisTraffic
from passes.sections.propagate_axis import MoveKind

BUCKETS = BucketCollectives()


def own_runtime(cluster: Cluster) -> Runtime:
    """The runtime of `autoshard.compile` on a cluster."""
    overlaps = overlap_of(cluster) is not None
    return Runtime(
        name=AUTOSHARD,
        early_stop=True,
        overlap_gradients=overlaps,
        overlap_parameters=overlaps,
        overlap_tensor=overlaps,
        fused=False,
        compiled=True,
    )


def step_model(recipe: Execution, cluster: Cluster) -> StepModel:
    """How kernels and collectives do in the steps of a recipe's runtime."""
    if not recipe.runtime.compiled:
        return fitted()
    overlap = overlap_of(cluster)
    return alone(0.0 if overlap is None else overlap.slowdown)


def at_rest_bytes(recipe: Execution) -> int:
    """Bytes of an element of parameters, gradients and state."""
    return 4 if recipe.runtime.master_weights or recipe.precision == "f32" else 2


def cast_bytes(recipe: Execution) -> int:
    """Bytes of an element of a parameter's copy that products read; 0: they read the parameter."""
    return 2 if at_rest_bytes(recipe) == 4 and recipe.precision != "f32" else 0


def bucket_count(total_bytes: float, ranks: int) -> int:
    """In how many collectives so many bytes are exchanged."""
    piece = total_bytes / ranks
    most = min(BUCKETS.most_bytes, max(BUCKETS.least_bytes, piece / 8))
    return max(1, round(piece / most))


def section_bucket_count(section_bytes: float, ranks: int) -> int:
    """In how many collectives so many bytes of one section are exchanged, of a model of many: buckets are large."""
    return max(1, round(section_bytes / ranks / BUCKETS.most_bytes))


def state_bytes(elements: float, shards: float, recipe: Execution) -> dict[str, float]:
    """Bytes of parameters, gradients and state of so many elements, see `price_memory.state_bytes`.

    Copies that products read are kept for the backward, but for those of ZeRO-3 and of what is computed again.
    """
    each = at_rest_bytes(recipe)
    keeps = recipe.zero < 3 and recipe.recompute != "full"
    parameters = elements * each / (shards if recipe.zero == 3 else 1) + elements * cast_bytes(recipe) * keeps
    summed = elements * each / (shards if recipe.zero >= 2 else 1)
    return {
        "parameters": parameters,
        "gradients": summed if recipe.micro_batches > 1 else 0.0,
        "optimizer state": elements * each * MOMENTS[recipe.optimizer] / (shards if recipe.zero else 1),
    }


def gradients_beside(elements: float, shards: float, recipe: Execution) -> float:
    """Bytes of the gradients of one micro-batch when all are made, in place of activations."""
    if recipe.micro_batches > 1:
        return 0.0
    return elements * at_rest_bytes(recipe) / (shards if recipe.zero else 1)


def update_bytes(recipe: Execution) -> float:
    """Bytes that the optimizer moves for each element: parameter and state read and written, gradient read."""
    return at_rest_bytes(recipe) * (3 + 2 * MOMENTS[recipe.optimizer])


def casting_bytes(recipe: Execution) -> float:
    """Bytes moved to cast each element of a parameter, or a gradient back."""
    cast = cast_bytes(recipe)
    return at_rest_bytes(recipe) + cast if cast else 0.0


def casts(recipe: Execution) -> float:
    """Kernels that cast each parameter, once per step, and its gradient, in each micro-batch; mean of a micro-batch."""
    return 1.0 + 1.0 / recipe.micro_batches if cast_bytes(recipe) else 0.0


def sent_again(traffic: Sequence[AxisTraffic]) -> tuple[AxisTraffic, ...]:
    """Traffic of a block's forward that is sent again where the block is computed again.

    Nothing waits for the last sum over the tensor axis. Values that products gather are there already, for the
    gradients of their weights.
    """
    gathered = [_is_tensor(item, MoveKind.GATHER) and item.has_weight for item in traffic]
    left = tuple(item for item, is_there in zip(traffic, gathered, strict=True) if not is_there)
    return left[:-1] if left and _is_tensor(left[-1], MoveKind.SCATTER, MoveKind.REDUCE) else left


def _is_tensor(item: AxisTraffic, *kinds: MoveKind) -> bool:
    return item.axis == "tensor" and item.kind in kinds


def end_copies(shards: float, recipe: Execution) -> float:
    """Bytes moved to copy each element of gradients that are reduced once per step, and of parameters.

    Reducing copies the whole, and the shard or the sum. ZeRO-1 and -2 cut the shard of a parameter out of it, and
    gather it when it is updated: both copy the whole and the shard.
    """
    if shards == 1:
        return 0.0
    with_shard = 1.0 + 1.0 / shards
    reduced = 0.0 if recipe.reduces_each else 2.0 if not recipe.zero else with_shard
    return at_rest_bytes(recipe) * (reduced + 2.0 * with_shard * (recipe.zero in (1, 2)))


def pass_bytes(recipe: Execution) -> float:
    """Bytes moved for each element of parameters in a micro-batch, beside products.

    Parameters are cast once per step (shards of ZeRO-3: so little that it does not count), gradients each time. They
    are added to a sum, but for the first; ZeRO-2 and -3 add shards, and copy what they reduce and gather.
    """
    each, casting, parts = at_rest_bytes(recipe), casting_bytes(recipe), recipe.micro_batches
    if recipe.reduces_each:
        gathers = 1.0 if recipe.gathers_once else 2.0
        gathered = gathers * (cast_bytes(recipe) or each) if recipe.zero == 3 else casting / parts
        return casting + each + gathered
    return casting / parts + casting + 3.0 * each * (1.0 - 1.0 / parts)
