"""Every recipe of a small model on a small joined cluster: the oracle of the search over its islands.

As `every_recipe`, whose prices are those of one island alone: the rules of docs/recipes.md are written down once more,
and whatever `Recipe` and pricing take beside them is a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product

from autoshard.errors import RecipeError
from autoshard.ir.recipe import RECOMPUTE, SCHEDULES, Recipe
from cost_models.errors import CostArgumentError
from cost_models.joined import JoinedCluster
from cost_models.schedule_orders import stage_ranks
from cost_models.step import fitted
from passes.recipes.pipeline_stages import even_blocks, name_of_schedule, share_out
from passes.recipes.place_islands import place_islands
from passes.recipes.price_islands import PlacedStep
from passes.sections.price_model import CountedModel
from tests.passes.every_recipe import axes_of, every_recipe, zeros_of


@dataclass(frozen=True, slots=True)
class Placed:
    """A recipe and what it takes: bytes of the fullest device of each island, 0 where it is idle."""

    recipe: Recipe
    time_s: float
    memory_bytes: tuple[int, ...]


def every_placed_price(
    counted: CountedModel, cluster: JoinedCluster, base: Recipe, least_tokens: int
) -> Iterator[Placed]:
    """All recipes that can be priced, whatever memory they take."""
    for recipe in _every_recipe(counted, cluster, base, least_tokens):
        try:
            placement = place_islands(recipe, cluster)
            prices = [counted.section_prices(recipe, island.cluster) for island in placement.islands]
            placed = PlacedStep(placement, prices, share_out(counted.blocks, recipe), recipe)
            step = placed.price(fitted())
        except RecipeError:
            continue
        needed = [each.total for each in placed.memory(step.in_flight)]
        places = recipe.islands or ()
        sizes = (needed[places.index(place)] if place in places else 0 for place in range(len(cluster.islands)))
        yield Placed(recipe, step.time_s, tuple(sizes))


def _every_recipe(counted: CountedModel, cluster: JoinedCluster, base: Recipe, least_tokens: int) -> Iterator[Recipe]:
    for place, island in enumerate(cluster.islands):
        for recipe in every_recipe(counted, island, base, least_tokens):
            yield replace(recipe, islands=(place,))
    places = range(len(cluster.islands))
    for count in range(2, len(places) + 1):
        for route in permutations(places, count):
            yield from _on_route(counted, cluster, replace(base, islands=route), least_tokens)


def _on_route(counted: CountedModel, cluster: JoinedCluster, base: Recipe, least_tokens: int) -> Iterator[Recipe]:
    islands = [cluster.islands[place] for place in base.islands or ()]
    devices, most_tensor = sum(each.size for each in islands), min(each.devices_per_node for each in islands)
    for axes in axes_of(counted, devices, most_tensor, least_tokens):
        stage = axes["data"] * axes["context"] * axes["tensor"]
        if any(island.size % stage for island in islands):
            continue
        pipes = _pipes(len(counted.blocks), [island.size // stage for island in islands])
        sizes = product(range(1, base.batch + 1), RECOMPUTE, zeros_of(axes["data"] * axes["context"]))
        for pipe, (micro_batch, recompute, zero) in product(pipes, list(sizes)):
            try:
                yield replace(base, **axes, **pipe, **zero, micro_batch=micro_batch, recompute=recompute)
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
