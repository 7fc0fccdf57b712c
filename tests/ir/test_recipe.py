"""Recipes check themselves."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard import Recipe, RecipeError


def test_a_recipe_counts_devices_and_micro_batches() -> None:
    """Ranks are pipeline x data x context x tensor; a replica runs its share of the batch in micro-batches."""
    recipe = Recipe(data=8, tensor=4, pipeline=2, context=2, micro_batch=2, global_batch=64)
    assert (recipe.devices, recipe.replicas, recipe.micro_batches) == (128, 16, 4)


def test_a_recipe_without_global_batch_runs_one_micro_batch() -> None:
    """The batch is then one micro-batch for every replica."""
    assert Recipe(data=4, micro_batch=3).batch == 12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": 0}, "data=0 must be a whole number"),
        ({"tensor": True}, "tensor=True must be a whole number"),
        ({"zero": 4}, "zero=4 is unknown; use one of 0, 1, 2, 3"),
        ({"recompute": "some"}, "recompute='some' is unknown"),
        ({"precision": "int8"}, "precision='int8' is unknown"),
        ({"fused": 1}, "fused=1 must be True or False"),
        ({"data": 2, "micro_batch": 2, "global_batch": 6}, "no multiple of micro_batch=2 x data=2"),
        ({"sequence_parallel": True}, "sequence_parallel=True splits activations over the tensor axis, but tensor=1"),
        ({"data": 6, "expert": 4}, "expert=4 must divide data=6 x context=1 x tensor=1"),
        ({"tensor": 4, "expert_tensor": 3}, "expert_tensor=3 must divide tensor=4"),
        ({"data": 8, "zero": 1, "zero_group": 3}, "zero_group=3 must divide data=8"),
        ({"offload": "optimizer"}, "offload='optimizer' needs zero of at least 1"),
        ({"virtual_stages": 2}, "virtual_stages=2 needs a pipeline"),
        ({"schedule": "gpipe"}, "schedule='gpipe' needs a pipeline"),
        ({"pipeline": 2, "schedule": "interleaved-1f1b"}, "needs virtual_stages of at least 2"),
        ({"pipeline": 2, "schedule": "zbv", "virtual_stages": 3}, "schedule='zbv' needs virtual_stages=2; it has 3"),
        ({"pipeline": 2, "schedule": "gpipe", "virtual_stages": 2}, "'gpipe' needs virtual_stages=1; it has 2"),
        ({"pipeline": 2, "stage_blocks": (1, 2, 3)}, "stage_blocks has 3 entries"),
        ({"pipeline": 2, "stage_blocks": (5, -1)}, r"stage_blocks=\(5, -1\) must be whole numbers"),
    ],
)
def test_a_contradiction_is_named(fields: dict[str, Any], message: str) -> None:
    """Each mistake has one clear sentence."""
    with pytest.raises(RecipeError, match=message):
        Recipe(**fields)
