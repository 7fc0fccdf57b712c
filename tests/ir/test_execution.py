"""An execution: a complete recipe together with a runtime, an optimizer and a precision."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard import Recipe, RecipeError
from autoshard.ir.execution import Execution
from autoshard.ir.runtime import OURS, RUNTIMES


def test_replicas_run_their_share_of_the_batch_in_micro_batches() -> None:
    """A replica runs its share of the global batch in micro-batches, and one micro-batch if there is
    no global batch."""
    assert Execution(data=8, tensor=4, pipeline=2, context=2, micro_batch=2, global_batch=64).micro_batches == 4
    assert Execution(data=4, micro_batch=3).batch == 12


@given(
    st.builds(Recipe, data=st.integers(1, 8), zero=st.integers(0, 3), recompute=st.sampled_from(["none", "full"])),
    st.sampled_from(sorted(RUNTIMES)),
)
def test_another_recipe_is_executed_alike(recipe: Recipe, name: str) -> None:
    """`Execution.of` another recipe keeps runtime, optimizer and precision, and fills free fields with defaults."""
    found = Execution(runtime=RUNTIMES[name], optimizer="sgd", precision="f8").of(recipe)
    plain = Execution()
    for item in fields(Recipe):
        asked = getattr(recipe, item.name)
        assert getattr(found, item.name) == (getattr(plain, item.name) if asked is None else asked)
    assert (found.runtime, found.optimizer, found.precision) == (RUNTIMES[name], "sgd", "f8")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": None}, "data=None must be a whole number"),
        ({"precision": "int8"}, "precision='int8' is unknown"),
        ({"optimizer": "rmsprop"}, "optimizer='rmsprop' is unknown"),
        ({"global_batch": 0}, "global_batch=0 must be a whole number"),
        ({"data": 2, "micro_batch": 2, "global_batch": 6}, "no multiple of micro_batch=2 x data=2"),
        ({"runtime": OURS, "tensor": 2, "expert": 2}, "expert=2 must divide data=1: with runtime='autoshard'"),
        ({"sequence_parallel": True}, "sequence_parallel=True splits activations over the tensor axis, but tensor=1"),
    ],
)
def test_what_cannot_be_executed_is_named(fields: dict[str, Any], message: str) -> None:
    """An unknown or impossible value is refused, and the error names the field and the value."""
    with pytest.raises(RecipeError, match=message):
        Execution(**fields)


def test_no_field_of_a_recipe_is_one_of_a_runtime() -> None:
    """A runtime shares no field with an execution, and a recipe has 15 fields."""
    runtime = {item.name for item in fields(RUNTIMES["megatron"])}
    assert len(fields(Recipe)) == 15
    assert not runtime & {item.name for item in fields(Execution)}
