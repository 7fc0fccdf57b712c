"""The groups of ranks of a recipe's axes."""

from __future__ import annotations

from autoshard import Cluster, Recipe
from passes.recipes.recipe_groups import recipe_groups


def _cluster(recipe: Recipe) -> Cluster:
    return Cluster("h100_sxm", max(1, recipe.devices // 8), min(8, recipe.devices))


def test_groups_follow_megatrons_order_of_ranks() -> None:
    """Tensor ranks are neighbours, then context and data; pipeline ranks are farthest."""
    recipe = Recipe(data=4, tensor=4, pipeline=2)
    groups = recipe_groups(recipe, _cluster(recipe))
    assert (groups.tensor.size, groups.tensor.inter) == (4, None)
    assert (groups.replicas.size, groups.replicas.per_node, groups.replicas.nodes) == (4, 2, 2)
    assert groups.neighbours.inter is not None
