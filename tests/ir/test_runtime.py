"""Profiles of other frameworks' runtimes."""

from __future__ import annotations

from autoshard import Recipe
from autoshard.ir.runtime import Runtime


def test_a_runtime_of_ones_own_is_a_usual_one() -> None:
    """It overlaps collectives with computation, and waits for the messages between the stages of a pipeline."""
    recipe = Runtime(name="mine").executes(Recipe(data=2, pipeline=2))
    assert recipe.overlap_gradients
    assert recipe.overlap_parameters
    assert recipe.overlap_tensor
    assert not recipe.overlap_pipeline
