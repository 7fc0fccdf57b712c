"""Every recipe of a small model on a small joined cluster: the oracle of the search over its islands.

As `every_recipe`, whose prices are those of one island alone: the rules of docs/recipes.md are written down once more,
and whatever `Recipe` and pricing take beside them is a recipe. They are many, so a slice of them is priced: those with
some values of some fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations, product

from autoshard.errors import RecipeError
from autoshard.ir.recipe import RECOMPUTE, SCHEDULES, Recipe
from cost_models.errors import CostArgumentError
from cost_models.joined import JoinedCluster
from cost_models.schedule_orders import stage_ranks
from cost_models.step import fitted
from passes.recipe_search.recipe_space import Only
from passes.recipes.pipeline_stages import even_blocks, name_of_schedule, share_out
from passes.recipes.place_islands import place_islands
from passes.recipes.price_islands import PlacedStep
from passes.sections.price_model import CountedModel
from passes.sections.price_sections import SectionPrice
from tests.passes.every_recipe import axes_of, every_recipe, zeros_of

_OF_SECTIONS = ("tensor", "sequence_parallel", "context", "expert", "expert_tensor", "micro_batch")
"""Fields that decide the prices of sections."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A recipe and what it takes: bytes of the fullest device of each island, 0 where it is idle."""

    recipe: Recipe
    time_s: float
    memory_bytes: tuple[int, ...]


def every_placed_price(
    counted: CountedModel, cluster: JoinedCluster, base: Recipe, least_tokens: int, only: Only
) -> Iterator[Placed]:
    """All recipes with some values of fields that can be priced, whatever memory of their devices they take."""
    known: dict[object, Mapping[str, SectionPrice]] = {}
    for recipe in _every_recipe(counted, cluster, base, least_tokens, only):
        try:
            placement = place_islands(recipe, cluster)
            prices = []
            for place, island in zip(recipe.islands or (), placement.islands, strict=True):
                key = (place, *(getattr(recipe, name) for name in _OF_SECTIONS))
                if key not in known:
                    known[key] = counted.section_prices(recipe, island.cluster)
                prices.append(known[key])
            placed = PlacedStep(placement, prices, share_out(counted.blocks, recipe), recipe)
            step = placed.price(fitted())
        except RecipeError:
            continue
        hosts = zip(placement.islands, placed.host_bytes(step.in_flight), strict=True)
        if any(size > (island.cluster.host_bytes_per_device or math.inf) for island, size in hosts):
            continue
        needed = [each.total for each in placed.memory(step.in_flight)]
        places = recipe.islands or ()
        sizes = (needed[places.index(place)] if place in places else 0 for place in range(len(cluster.islands)))
        yield Placed(recipe, step.time_s, tuple(sizes))


def _every_recipe(
    counted: CountedModel, cluster: JoinedCluster, base: Recipe, least_tokens: int, only: Only
) -> Iterator[Recipe]:
    for place, island in enumerate(cluster.islands):
        for recipe in every_recipe(counted, island, base, least_tokens):
            if _admits(only, {name: getattr(recipe, name) for name in only}):
                yield replace(recipe, islands=(place,))
    places = range(len(cluster.islands))
    for count in range(2, len(places) + 1):
        for route in permutations(places, count):
            yield from _on_route(counted, cluster, replace(base, islands=route), least_tokens, only)


def _admits(only: Only, values: Mapping[str, object]) -> bool:
    """Whether fields may have such values."""
    return all(value in only[name] for name, value in values.items() if name in only)


def _on_route(
    counted: CountedModel, cluster: JoinedCluster, base: Recipe, least_tokens: int, only: Only
) -> Iterator[Recipe]:
    islands = [cluster.islands[place] for place in base.islands or ()]
    devices, most_tensor = sum(each.size for each in islands), min(each.devices_per_node for each in islands)
    for axes in axes_of(counted, devices, most_tensor, least_tokens):
        stage = axes["data"] * axes["context"] * axes["tensor"]
        if any(island.size % stage for island in islands):
            continue
        pipes = _pipes(len(counted.blocks), [island.size // stage for island in islands])
        away = ("none", "activations") if all(island.device.host_link for island in islands) else ("none",)
        sizes = product(range(1, base.batch + 1), RECOMPUTE, away, zeros_of(axes["data"] * axes["context"]))
        rest = [
            {"micro_batch": micro_batch, "recompute": recompute, "offload": offload, **zero}
            for micro_batch, recompute, offload, zero in sizes
        ]
        for pipe, others in product(pipes, [each for each in rest if _admits(only, each)]):
            try:
                yield replace(base, **axes, **pipe, **others)
            except RecipeError:
                continue


def _pipes(blocks: int, ranks: list[int]) -> Iterator[dict[str, object]]:
    """Blocks are shared out over islands in every way, and as even as can be over the stages of each."""
    of_ranks, total = [place for place, count in enumerate(ranks) for _ in range(count)], sum(ranks)
    for schedule, virtual in product(SCHEDULES, range(1, (blocks + 2) // total + 1)):
        try:
            owners = [of_ranks[rank] for rank in stage_ranks(name_of_schedule(schedule, virtual), total, virtual)]
        except CostArgumentError:
            continue
        for share in product(range(blocks + 1), repeat=len(ranks)):
            for split_ends in (False, True) if sum(share) == blocks else ():
                counts = _spread(owners, share, split_ends)
                if min(counts) >= 0 and all(counts[1:-1]):
                    yield {
                        "pipeline": total, "schedule": schedule, "virtual_stages": virtual, "stage_blocks": counts,
                    }  # fmt: skip


def _spread(owners: list[int], share: tuple[int, ...], split_ends: bool) -> list[int]:
    slots = list(share)
    slots[owners[0]] += split_ends
    slots[owners[-1]] += split_ends
    parts = [iter(even_blocks(slots[place], owners.count(place), split_ends=False)) for place in range(len(share))]
    counts = [next(parts[owner]) for owner in owners]
    counts[0] -= split_ends
    counts[-1] -= split_ends
    return counts
