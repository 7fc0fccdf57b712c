"""Every recipe of a small model on a small cluster, field by field: the reference of the search over recipes.

The module does not use `passes.search.recipe_space`, and states the rules of docs/explanation/how_plans_are_found.md
independently. Any value that `Recipe` and pricing accept counts as a recipe. A choice with several names appears
several times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from autoshard.errors import RecipeError
from autoshard.ir.execution import Execution
from autoshard.ir.recipe import RECOMPUTE
from cost_models.hardware import Cluster
from cost_models.schedule_orders import SCHEDULES
from passes.search.layers.price_model import CountedModel
from passes.search.pipeline_stages import even_blocks
from passes.search.recipe_plan import predict_recipe

HEADS = EXPERTS = 4
"""Heads and experts of the models of `tests.passes.decoders`. All other sizes that axes split are multiples of 4."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A recipe with its predicted step time and peak memory."""

    recipe: Execution
    time_s: float
    memory_bytes: int


def every_price(counted: CountedModel, cluster: Cluster, base: Execution, least_tokens: int) -> list[Priced]:
    """Return all recipes that `predict_recipe` can price, also recipes that do not fit the devices' memory."""
    found = []
    for recipe in every_recipe(counted, cluster, base, least_tokens):
        try:
            prediction = predict_recipe(counted, recipe, cluster)
        except RecipeError:
            continue
        found.append(Priced(recipe, prediction.step_time_s, prediction.peak_memory_bytes))
    return found


def every_recipe(counted: CountedModel, cluster: Cluster, base: Execution, least_tokens: int) -> Iterator[Execution]:
    """Yield all recipes within the rules, also some that `predict_recipe` refuses."""
    away = ("none", "activations") if cluster.device.host_link is not None else ("none",)
    policies = tuple(product(RECOMPUTE, away)) if counted.blocks else (("none", "none"),)
    known = axes_of(counted, cluster.size, cluster.devices_per_node, least_tokens)
    for axes, pipe in product(known, _pipes(counted, cluster.size)):
        replicas = axes["data"] * axes["context"]
        if pipe["pipeline"] != cluster.size / axes["tensor"] / replicas:
            continue
        for micro_batch, (recompute, offload), zero in product(range(1, base.batch + 1), policies, zeros_of(replicas)):
            kept = {"recompute": recompute, "offload": offload}
            try:
                yield replace(base, **axes, **pipe, **zero, micro_batch=micro_batch, **kept)
            except RecipeError:
                continue


def axes_of(
    counted: CountedModel, devices: int, most_tensor: int, least_tokens: int
) -> Iterator[dict[str, int | bool]]:
    """Yield the sizes of axes that divide heads and experts, with at most `most_tensor` tensor ranks."""
    has_dense = len(set(counted.blocks)) > 1 or not counted.has_experts
    sizes = range(1, devices + 1)
    experts = sizes if counted.has_experts else (1,)
    for data, tensor, context, expert in product(sizes, sizes, sizes, experts):
        divides = HEADS % tensor == 0 and HEADS % context == 0 and EXPERTS % expert == 0
        if not divides or tensor > most_tensor or context * least_tokens > counted.tokens:
            continue
        for parallel, expert_tensor in product((False, True), {1, tensor if counted.has_experts else 1}):
            splits = tensor == 1 or has_dense or parallel or expert_tensor > 1
            if splits and expert_tensor * expert <= EXPERTS * HEADS:
                yield {
                    "data": data, "tensor": tensor, "context": context, "expert": expert,
                    "sequence_parallel": parallel, "expert_tensor": expert_tensor,
                }  # fmt: skip


def _pipes(counted: CountedModel, devices: int) -> Iterator[dict[str, object]]:
    blocks = len(counted.blocks)
    yield {"pipeline": 1, "schedule": None}
    for ranks, schedule in product(range(2, devices + 1), SCHEDULES.values()):
        for virtual, split_ends in product(schedule.numbers_of_stages((blocks + 2) // ranks), (False, True)):
            if schedule.is_searched and virtual * ranks <= blocks + 2 * split_ends:
                yield {
                    "pipeline": ranks,
                    "schedule": schedule.name,
                    "virtual_stages": virtual,
                    "stage_layers": even_blocks(blocks, ranks * virtual, split_ends=True) if split_ends else None,
                }


def zeros_of(replicas: int) -> Iterator[dict[str, int | None]]:
    """Yield ZeRO 0, and ZeRO 1 to 3 over each group size from 2 to `replicas`."""
    yield {"zero": 0}
    for zero, group in product((1, 2, 3), range(2, replicas + 1)):
        yield {"zero": zero, "zero_group": group}
