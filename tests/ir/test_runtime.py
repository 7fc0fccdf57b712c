"""Profiles of the runtimes of other frameworks."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard import RecipeError, Runtime


def test_a_runtime_of_ones_own_is_a_usual_one() -> None:
    """The default runtime overlaps collectives with computation, and waits for messages between stages."""
    runtime = Runtime(name="mine")
    assert runtime.overlap_gradients
    assert runtime.overlap_parameters
    assert runtime.overlap_tensor
    assert not runtime.overlap_pipeline


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fused": 1}, "fused=1 must be True or False"),
        ({"bucket_bytes": 0}, "bucket_bytes=0 must be a whole number"),
        ({"gradient_dtype": "f8"}, "gradient_dtype='f8' is unknown"),
        ({"schedules": ("2F2B",)}, "schedules='2F2B' is unknown"),
        ({"zero_in_pipelines": (4,)}, "zero=4 is unknown"),
    ],
)
def test_what_no_runtime_does_is_named(fields: dict[str, Any], message: str) -> None:
    """An impossible field of a runtime is refused with the field and the value."""
    with pytest.raises(RecipeError, match=message):
        Runtime(name="mine", **fields)
