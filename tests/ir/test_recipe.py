"""Recipes check their own fields, count devices, and print in words."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from autoshard import Recipe, RecipeError
from autoshard.ir.execution import Execution
from cost_models.schedule_orders import SCHEDULES


def test_a_recipe_counts_devices() -> None:
    """The devices of a recipe are the product of its pipeline, data, context and tensor degrees."""
    assert Recipe(data=8, tensor=4, pipeline=2, context=2).devices == 128
    assert Recipe(data=8).devices == 8


def test_a_recipe_says_what_is_decided() -> None:
    """A partial recipe prints the fields that are decided, and says that the others are searched."""
    assert {getattr(Recipe(), item.name) for item in fields(Recipe)} == {None}
    assert Recipe().words == "everything is searched"
    assert Recipe(schedule="ZBVZeroBubble").words == "schedule='ZBVZeroBubble'; all else is searched"
    free = replace(Execution(data=2).recipe, zero=None, recompute=None)
    assert free.words.endswith("; searched: zero, recompute")
    assert (Recipe().is_complete, free.is_complete, Execution().recipe.is_complete) == (False, False, True)


def test_a_complete_recipe_is_a_sentence() -> None:
    """A complete recipe prints as a sentence in the usual terms."""
    recipe = Execution(data=4, zero=1, tensor=8, sequence_parallel=True, pipeline=2).recipe
    assert recipe.words == (
        "data 4 (ZeRO-1), tensor 8 with sequence parallelism, pipeline 2 (1F1B); micro-batches of 1"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": 0}, "data=0 must be a whole number"),
        ({"tensor": True}, "tensor=True must be a whole number"),
        ({"zero": 4}, "zero=4 is unknown; use one of 0, 1, 2, 3"),
        ({"zero": True}, "zero=True is unknown; use one of 0, 1, 2, 3"),
        ({"stage_layers": (True, 1)}, r"stage_layers=\(True, 1\) must be whole numbers"),
        ({"zero": 1.0}, "zero=1.0 is unknown; use one of 0, 1, 2, 3"),
        ({"recompute": "some"}, "recompute='some' is unknown"),
        ({"tensor": 2, "sequence_parallel": 1}, "sequence_parallel=1 must be True or False"),
        (
            {"sequence_parallel": True, "tensor": 1},
            "sequence_parallel=True splits activations over the tensor axis, but tensor=1",
        ),
        (
            {"data": 6, "context": 1, "tensor": 1, "expert": 4, "expert_tensor": 1},
            "expert=4 must divide data=6 x context=1 x tensor=1",
        ),
        ({"tensor": 4, "expert_tensor": 3}, "expert_tensor=3 must divide tensor=4"),
        ({"data": 8, "context": 1, "zero_group": 3}, "zero_group=3 must divide data=8"),
        ({"offload": "optimizer", "zero": 0}, "offload='optimizer' needs zero of at least 1"),
        ({"virtual_stages": 2, "pipeline": 1}, "virtual_stages=2 needs a pipeline"),
        ({"schedule": "GPipe", "pipeline": 1}, "schedule='GPipe' needs a pipeline"),
        ({"schedule": "Interleaved1F1B", "virtual_stages": 1}, "needs virtual_stages of at least 2; it has 1"),
        (
            {"schedule": "ZBVZeroBubble", "virtual_stages": 3},
            "schedule='ZBVZeroBubble' needs virtual_stages=2; it has 3",
        ),
        ({"pipeline": 2, "schedule": "GPipe", "virtual_stages": 2}, "'GPipe' needs virtual_stages=1; it has 2"),
        ({"pipeline": 2, "stage_layers": (1, 2, 3)}, "stage_layers has 3 entries"),
        ({"pipeline": 2, "stage_layers": (5, -1)}, r"stage_layers=\(5, -1\) must be whole numbers"),
    ],
)
def test_a_contradiction_is_named(fields: dict[str, Any], message: str) -> None:
    """An impossible value of a field is refused with the field and the value."""
    with pytest.raises(RecipeError, match=message):
        Recipe(**fields)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_that_runs_is_asked_for_by_its_name(schedule: str) -> None:
    """Each schedule can be named in a recipe, which then has the fewest virtual stages. Other names are refused."""
    least = SCHEDULES[schedule].least_stages
    recipe = Execution().of(Recipe(pipeline=2, schedule=schedule))
    assert f"pipeline 2 ({schedule}" in recipe.words
    assert recipe.virtual_stages == least
    with pytest.raises(RecipeError, match=f"schedule='{schedule.lower()}x' is unknown; use one of None, GPipe, 1F1B"):
        Recipe(pipeline=2, schedule=f"{schedule.lower()}x", virtual_stages=least)
