"""On which meshes a recipe may lie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard import Mesh, Recipe, RecipeError
from passes.planning.recipe_meshes import check_mesh, meshes_of_recipe

FITTING = [
    (Recipe(data=4), {"data": 4}),
    (replace(Recipe(), data=None), {"data": 4}),
    (Recipe(data=4, zero=3, zero_group=4), {"data": 4}),
    (Recipe(data=4, zero=3, zero_group=2), {"replica": 2, "data": 2}),
    (Recipe(data=4, expert=2), {"data": 2, "expert": 2}),
]
ELSEWHERE = [
    (Recipe(data=4), {"replica": 2, "data": 2}),
    (Recipe(data=4, zero=3, zero_group=4), {"replica": 2, "data": 2}),
    (Recipe(data=4, zero=3, zero_group=2), {"data": 4}),
    (Recipe(data=4, zero=3, zero_group=2), {"replica": 4}),
]


@pytest.mark.parametrize(("recipe", "axes"), FITTING)
def test_a_recipe_lies_on_its_own_meshes(recipe: Recipe, axes: dict[str, int]) -> None:
    """Ranks that share shards are an axis, and what they copy each other's over is another."""
    check_mesh(recipe, Mesh(axes))
    assert Mesh(axes) in meshes_of_recipe(recipe, 4, 4)


@pytest.mark.parametrize(("recipe", "axes"), ELSEWHERE)
def test_groups_of_shards_need_their_axis(recipe: Recipe, axes: dict[str, int]) -> None:
    """Copies of shards lie where `zero_group` says, and only there."""
    assert Mesh(axes) not in meshes_of_recipe(recipe, 4, 4)
    with pytest.raises(RecipeError, match="zero_group"):
        check_mesh(recipe, Mesh(axes))
