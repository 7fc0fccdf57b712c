"""Where a recipe's pipeline lies in a joined cluster: each pipeline rank in one island, those of an island in a row.

A stage has the same number of ranks (data x context x tensor) wherever it lies, so each island that the pipeline passes
has as many pipeline ranks as its devices make. All axes but the pipeline's lie inside an island.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import permutations

from autoshard.errors import RecipeError
from autoshard.ir.recipe import Recipe
from cost_models.collectives import all_gather_time, point_to_point_time
from cost_models.hardware import Cluster
from cost_models.joined import JoinedCluster
from cost_models.step import StepModel
from cost_models.topology import Link
from passes.recipes.recipe_groups import Groups, recipe_groups


@dataclass(frozen=True, slots=True)
class Island:
    """A part of a pipeline that lies in one island.

    Args:
        cluster: the island.
        ranks: pipeline ranks that lie there.
        groups: of their devices.
    """

    cluster: Cluster
    ranks: int
    groups: Groups


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pipeline lies.

    Args:
        islands: that it passes, in order.
        links: between two of them, by their numbers in that order, either way.
    """

    islands: tuple[Island, ...]
    links: Mapping[tuple[int, int], Link]

    @property
    def of_ranks(self) -> tuple[int, ...]:
        """By pipeline rank, which of the islands it lies in."""
        return tuple(number for number, island in enumerate(self.islands) for _ in range(island.ranks))


def place_islands(recipe: Recipe, cluster: JoinedCluster) -> Placement:
    """The islands that a recipe's pipeline passes, in order.

    Raises:
        RecipeError: an island that the cluster has not, one that stages do not fill, or a number of pipeline ranks that
            they have not.
    """
    places = chosen_islands(recipe, cluster)
    stage = recipe.replicas * recipe.tensor
    for place in places:
        island = cluster.islands[place]
        if island.size % stage:
            raise RecipeError(
                f"A pipeline stage takes data={recipe.data} x context={recipe.context} x tensor={recipe.tensor} = "
                f"{stage} devices, which do not fill island {place} ({island.name}) of {island.size}: all axes but the "
                "pipeline's lie inside an island."
            )
    ranks = [cluster.islands[place].size // stage for place in places]
    if sum(ranks) != recipe.pipeline:
        shares = " + ".join(map(str, ranks))
        raise RecipeError(
            f"pipeline={recipe.pipeline}, but with data={recipe.data} x context={recipe.context} x "
            f"tensor={recipe.tensor} the islands {', '.join(map(str, places))} of {cluster.name} have "
            f"{shares} = {sum(ranks)} pipeline ranks."
        )
    islands = (_island(recipe, cluster.islands[place], count) for place, count in zip(places, ranks, strict=True))
    pairs = permutations(enumerate(places), 2)
    return Placement(tuple(islands), {(one, two): cluster.link(first, second) for (one, first), (two, second) in pairs})


def chosen_islands(recipe: Recipe, cluster: JoinedCluster) -> tuple[int, ...]:
    """The places of the islands that a recipe's pipeline passes. Raises RecipeError if there is no such island."""
    everything = tuple(range(len(cluster.islands)))
    places = everything if recipe.islands is None else tuple(recipe.islands)
    if missing := [place for place in places if place not in everything]:
        raise RecipeError(
            f"islands={recipe.islands!r} has {missing[0]!r}, but {cluster.name} has the islands 0 to {everything[-1]}."
        )
    return places


def _island(recipe: Recipe, cluster: Cluster, ranks: int) -> Island:
    return Island(cluster, ranks, recipe_groups(alone(recipe, ranks), cluster))


def alone(recipe: Recipe, ranks: int) -> Recipe:
    """What a recipe does on an island that has so many of its pipeline ranks, as if there were no other."""
    return replace(
        recipe, pipeline=ranks, schedule=None, virtual_stages=1, stage_blocks=None, split_ends=False, islands=None
    )


def crossing_time(
    first: Island, second: Island, whole_bytes: float, link: Link, recipe: Recipe, model: StepModel
) -> float:
    """Seconds of handing a block's input from one island to another, or its gradient back, whichever takes longer.

    As inside an island, `price_recipe.send_time`: each tensor rank sends its part, which the receiver gathers.
    """
    part = whole_bytes if recipe.sequence_parallel else whole_bytes / recipe.tensor
    sent = point_to_point_time(part, link) * model.network_slowdown
    if recipe.tensor == 1 or recipe.sequence_parallel:
        return sent
    gathers = (all_gather_time(whole_bytes, island.groups.tensor) for island in (first, second))
    return sent + max(gathers) * model.fabric_slowdown
