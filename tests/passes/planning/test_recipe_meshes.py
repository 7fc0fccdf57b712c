"""`check_mesh` and `meshes_of_recipe`, which say on which meshes a recipe runs."""

from __future__ import annotations

import pytest

from autoshard import Mesh, Recipe, RecipeError
from passes.planning.recipe_meshes import check_mesh, meshes_of_recipe

FITTING = [
    (Recipe(data=4), {"data": 4}),
    (Recipe(), {"data": 4}),
    (Recipe(zero=1), {"data": 2, "model": 2}),
    (Recipe(tensor=2), {"data": 2, "model": 2}),
    (Recipe(data=1, tensor=2), {"context": 2, "model": 2}),
    (Recipe(schedule="ZBVZeroBubble", pipeline=2), {"pipeline": 2, "data": 2}),
    (Recipe(data=4, zero=3, zero_group=4), {"data": 4}),
    (Recipe(data=4, zero=3, zero_group=2), {"replica": 2, "data": 2}),
    (Recipe(data=4, expert=2), {"data": 2, "expert": 2}),
]
ELSEWHERE = [
    (Recipe(data=4, zero=3, zero_group=4), {"replica": 2, "data": 2}),
    (Recipe(data=4, zero=3, zero_group=2), {"data": 4}),
    (Recipe(data=4, zero=3, zero_group=2), {"replica": 4}),
]


@pytest.mark.parametrize(("recipe", "axes"), FITTING)
def test_a_recipe_lies_on_its_own_meshes(recipe: Recipe, axes: dict[str, int]) -> None:
    """A mesh whose axes fit a recipe is accepted, and is one of the recipe's meshes for four devices."""
    check_mesh(recipe, Mesh(axes))
    assert Mesh(axes) in meshes_of_recipe(recipe, 4, 4)


@pytest.mark.parametrize(("recipe", "axes"), ELSEWHERE)
def test_groups_of_shards_need_their_axis(recipe: Recipe, axes: dict[str, int]) -> None:
    """A mesh whose axes "replica" and "data" contradict `zero_group` is refused."""
    assert Mesh(axes) not in meshes_of_recipe(recipe, 4, 4)
    with pytest.raises(RecipeError, match="zero_group"):
        check_mesh(recipe, Mesh(axes))


@pytest.mark.parametrize(
    ("recipe", "axes"),
    [
        (Recipe(data=4), {"replica": 2, "data": 2}),
        (Recipe(schedule="ZBVZeroBubble", virtual_stages=2), {"pipeline": 2, "x": 2, "y": 2}),
        (Recipe(stage_layers=(1, 3)), {"pipeline": 2}),
        (Recipe(tensor=2), {"model": 2, "x": 2}),
    ],
)
def test_the_axes_of_a_mesh_say_what_a_recipe_leaves_out(recipe: Recipe, axes: dict[str, int]) -> None:
    """A mesh may have axes for fields that the recipe leaves out, and axes of other names."""
    check_mesh(recipe, Mesh(axes))


@pytest.mark.parametrize(
    ("recipe", "axes", "words"),
    [
        (
            Recipe(schedule="GPipe"),
            {"data": 2},
            r"needs a pipeline, but pipeline=1\. .* Mesh\(data=2\)",
        ),
        (Recipe(virtual_stages=2), {"data": 2}, "virtual_stages=2 needs a pipeline"),
        (Recipe(stage_layers=(1, 3)), {"pipeline": 4}, "stage_layers has 2 entries, but there are pipeline=4"),
        (Recipe(pipeline=4), {"pipeline": 2}, "pipeline=4, but the mesh .* has 2 ranks along 'pipeline'"),
        (Recipe(data=4), {"data": 8}, "data=4, but the mesh .* has 8 ranks along 'data'"),
        (Recipe(data=4), {"replica": 2, "data": 4}, "data=4, but the mesh .* has 8 ranks along 'replica' x 'data'"),
        (Recipe(data=4), {"data": 4, "expert": 2}, "data=4, but the mesh .* has 8 ranks along 'data' x 'expert'"),
        (Recipe(data=2, context=1, tensor=1), {"data": 2, "x": 2}, r"Mesh\(data=2, x=2\) has 'x'\. Name .* or leave"),
    ],
)
def test_a_recipe_that_contradicts_a_mesh_is_refused(recipe: Recipe, axes: dict[str, int], words: str) -> None:
    """A recipe that contradicts a mesh is refused, and the error names the field and the axis."""
    with pytest.raises(RecipeError, match=words):
        check_mesh(recipe, Mesh(axes))


def test_a_schedule_on_a_cluster_takes_a_pipeline() -> None:
    """On a cluster, a pipeline schedule without a number of stages is refused."""
    with pytest.raises(RecipeError, match="schedule='GPipe' needs a pipeline"):
        meshes_of_recipe(Recipe(schedule="GPipe"), 4, 4)


@pytest.mark.parametrize(
    ("recipe", "found"),
    [
        (Recipe(zero=3, zero_group=4), [{"data": 4}]),
        (Recipe(zero=3, zero_group=2), [{"replica": 2, "data": 2}, {"data": 2, "model": 2}]),
        (Recipe(expert=4), [{"expert": 4}]),
    ],
)
def test_open_axes_take_the_sizes_that_groups_and_experts_divide(recipe: Recipe, found: list[dict[str, int]]) -> None:
    """Meshes of a recipe without `data` and `tensor` have only sizes that fit its ZeRO groups and experts."""
    assert meshes_of_recipe(recipe, 4, 4) == [Mesh(axes) for axes in found]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(zero=3, zero_group=3), "^zero_group=3 must divide data=1 or 2 or 4, as 4 devices have"),
        (Recipe(expert=3), "^expert=3 must divide data=1 or 2 or 4"),
        (Recipe(data=2, expert=2, tensor=4), "^data=2 x tensor=4 does not make 4 devices"),
        (Recipe(data=4, zero=3, zero_group=3), "^zero_group=3 must divide data=4"),
    ],
)
def test_a_recipe_that_no_mesh_fits_is_refused(recipe: Recipe, words: str) -> None:
    """A recipe without a mesh of four devices is refused, and the error names the fields that do not fit."""
    with pytest.raises(RecipeError, match=words):
        meshes_of_recipe(recipe, 4, 4)
