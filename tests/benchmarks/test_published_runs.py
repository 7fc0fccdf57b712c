"""What is known of the published runs beside their rows."""

from __future__ import annotations

from tests.benchmarks.published_runs import read_rows, recipe_of


def test_embeddings_count_as_a_block_where_the_source_says_so() -> None:
    """All rows of BLOOM's prototype of 106 blocks on 12 stages: 106 + 2 divides by 12, 106 does not."""
    recipes = [recipe_of(row) for row in read_rows() if row["model"]["name"] == "bloom-proto-12288x106"]
    assert len(recipes) == 6
    assert all(recipe.split_ends and (106 + 2) % recipe.pipeline == 0 for recipe in recipes)


def test_internevo_waits_for_its_broadcasts() -> None:
    """The software of its rows' date: gradients are reduced beside the backward, parameters after the update."""
    recipes = [recipe_of(row) for row in read_rows() if row["source"]["key"] == "internevo"]
    assert recipes
    assert all(recipe.overlap_gradients and not recipe.overlap_parameters for recipe in recipes)
