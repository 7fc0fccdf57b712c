"""Which part of a rank's memory a value belongs to."""

from __future__ import annotations

import pytest

from passes.planning.storage_walk import Storage, _mark_gradient


@pytest.mark.parametrize("part", ["activations", "parameters", "optimizer state", "inputs", "gradients"])
def test_a_gradient_takes_memory_of_its_own_only(part: str) -> None:
    """One that lies where a parameter or an input lies adds nothing to the gradients."""
    storage = Storage(("x", 0), part, 4, 0, 0)
    _mark_gradient(storage)
    assert storage.part == ("gradients" if part == "activations" else part)
