"""Peak memory of a rank under a recipe: what lies there all the time, and what a step adds.

* Parameters, gradients and optimizer state, each sharded as the ZeRO stage says. Under ZeRO-3 the shard is the master
  weight; two blocks' weights are gathered at a time.
* Activations: what each micro-batch in flight keeps for its backward. With full recomputation that is what enters each
  block, and what a block keeps while its backward runs; with selective, all but the core (attention's, or the modules
  that it names). Offloaded, what blocks keep lies on the host, but for two of them: the one whose values go
  or come, and its neighbour.
* What the update needs beside them, in place of activations where it is more: gradients in float32, for master weights.
* Workspace: the most that one kernel reads and writes of what is not kept: of logits that are kept their gradient, of
  other values a gradient and what is made of it. One section at a time has it, and what is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.ir.execution import Execution
from cost_models.memory import MOMENTS
from passes.search.layers.fold_program import AFTER, BEFORE
from passes.search.layers.price_layers import SectionPrice, SectionSizes
from passes.search.pipeline_stages import Stage, rank_sections
from passes.search.price_ends import GRADIENT_BYTES, WEIGHT_BYTES
from passes.search.recipe_groups import Groups


@dataclass(frozen=True, slots=True)
class MemoryPrice:
    """Bytes of the fullest rank, by what they are; `total` is their sum."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.parts.values())


def memory_price(
    sections: Mapping[str, SectionPrice],
    stages: Sequence[Stage],
    recipe: Execution,
    groups: Groups,
    in_flight: Sequence[float],
) -> MemoryPrice:
    """The memory of the fullest pipeline rank.

    Args:
        sections: price of each section.
        stages: how often each stage has each section.
        recipe: what is kept, sharded and computed again.
        groups: how many ranks share.
        in_flight: by pipeline rank, micro-batches that each of its stages holds at its peak.
    """
    fullest: dict[tuple[tuple[str, int], ...], float] = {}
    for counts, held in zip(rank_sections(stages, recipe), in_flight, strict=True):
        kind = tuple(counts.items())
        fullest[kind] = max(held, fullest.get(kind, held))
    ranks = [rank_memory(sections, dict(kind), recipe, groups, held) for kind, held in fullest.items()]
    return max(ranks, key=lambda memory: memory.total)


def rank_memory(
    sections: Mapping[str, SectionPrice],
    counts: Mapping[str, int],
    recipe: Execution,
    groups: Groups,
    in_flight: float,
) -> MemoryPrice:
    """The memory of a pipeline rank that has sections so often; see `memory_price`."""
    dense = sum(sections[name].parameters * count for name, count in counts.items())
    expert = sum(sections[name].expert_parameters * count for name, count in counts.items())
    parts = {"parameters": 0.0, "gradients": 0.0, "optimizer state": 0.0}
    for elements, shards in ((dense, groups.zero.size), (expert, groups.expert_replicas.size)):
        for name, size in state_bytes(elements, shards, recipe).items():
            parts[name] += size
    blocks = [sections[name] for name in counts if name not in (BEFORE, AFTER)]
    if recipe.zero == 3:
        parts["gathered parameters"] = max((gathered_bytes(block, recipe) for block in blocks), default=0.0)
    kept = {name: kept_bytes(sections[name], name, recipe) for name in counts}
    parts["activations"] = in_flight * sum(
        kept[name] * count for name, count in counts.items() if not is_offloaded(name, recipe)
    )
    away = [(kept[name], count) for name, count in counts.items() if is_offloaded(name, recipe)]
    if away:
        in_passing = 2 * max(size for size, _ in away)
        parts["offload buffers"] = min(in_passing, in_flight * sum(size * count for size, count in away))
    at_work = [(again_bytes(sections[name], name, recipe), sections[name].workspace_bytes) for name in counts]
    again, workspace = max(at_work, key=sum)
    parts |= {"recomputed activations": again, "workspace": workspace}
    update = update_bytes(dense, groups.zero.size, recipe) + update_bytes(expert, groups.expert_replicas.size, recipe)
    passing = ("activations", "offload buffers", "recomputed activations", "gathered parameters", "workspace")
    if update > sum(parts.get(name, 0.0) for name in passing):
        parts = {name: size for name, size in parts.items() if name not in passing} | {"update": update}
    return MemoryPrice({name: int(size) for name, size in parts.items() if size})


def state_bytes(elements: float, shards: float, recipe: Execution) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state of `elements` parameters on one rank."""
    weight, gradient = WEIGHT_BYTES[recipe.precision], GRADIENT_BYTES[recipe.runtime.gradient_dtype]
    extra = 2 if recipe.runtime.separate_sum and gradient > 2 else 0
    has_masters = recipe.runtime.master_weights
    state = (4 if has_masters else weight) * MOMENTS[recipe.optimizer] + (4 if has_masters and recipe.zero < 3 else 0)
    if recipe.zero == 3:
        weight = 4 if has_masters else weight
    on_device = 0.0 if recipe.offload in ("optimizer", "parameters") else 1.0
    return {
        "parameters": elements * weight / (shards if recipe.zero == 3 else 1),
        "gradients": elements * (gradient + extra) / (shards if recipe.zero >= 2 else 1),
        "optimizer state": on_device * elements * state / (shards if recipe.zero >= 1 else 1),
    }


def gathered_bytes(block: SectionSizes, recipe: Execution) -> float:
    """Bytes of what ZeRO-3 gathers of a block: its weights, and its neighbour's."""
    return 2.0 * WEIGHT_BYTES[recipe.precision] * (block.parameters + block.expert_parameters)


def update_bytes(elements: float, shards: float, recipe: Execution) -> float:
    """Bytes of the float32 copy of gradients that master weights are updated with."""
    if not recipe.runtime.master_weights or recipe.runtime.gradient_dtype == "f32":
        return 0.0
    return 4.0 * elements / (shards if recipe.zero >= 1 else 1)


def host_bytes(
    sections: Mapping[str, SectionSizes], stages: Sequence[Stage], recipe: Execution, in_flight: Sequence[float]
) -> int:
    """Bytes that lie on the host for the rank that has most there; see `memory_price`."""
    ranks = zip(rank_sections(stages, recipe), in_flight, strict=True)
    return max(rank_host_bytes(sections, counts, recipe, held) for counts, held in ranks)


def rank_host_bytes(
    sections: Mapping[str, SectionSizes], counts: Mapping[str, int], recipe: Execution, in_flight: float
) -> int:
    """Bytes that lie on the host for a pipeline rank that has sections so often."""
    away = {name: count for name, count in counts.items() if is_offloaded(name, recipe)}
    return int(in_flight * sum(kept_bytes(sections[name], name, recipe) * count for name, count in away.items()))


def is_offloaded(name: str, recipe: Execution) -> bool:
    """Whether what a section keeps lies on the host."""
    return recipe.offload == "activations" and name not in (BEFORE, AFTER)


def again_bytes(price: SectionSizes, name: str, recipe: Execution) -> int:
    """Bytes that a section keeps while its backward runs, where they are computed again."""
    if name in (BEFORE, AFTER):
        return 0
    return {"none": 0, "selective": price.core_bytes, "full": price.saved_bytes}[recipe.recompute]


def kept_bytes(price: SectionSizes, name: str, recipe: Execution) -> int:
    """Bytes that a micro-batch keeps of a section, on the device or on the host."""
    return price.saved_bytes if name in (BEFORE, AFTER) else block_bytes(price, recipe)


def block_bytes(price: SectionSizes, recipe: Execution) -> int:
    """Bytes that a micro-batch keeps of a block."""
    if recipe.recompute == "none":
        return price.saved_bytes
    return price.entering_bytes if recipe.recompute == "full" else price.saved_bytes - price.core_bytes
