"""`match` pairs the tensors of files with the names of a model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from autoshard.runtime.weights.weight_names import match


def test_tensors_of_a_plain_model_have_its_names() -> None:
    """For a plain model, tensors match by name alone, and all others are unexpected."""
    pytest.importorskip("transformers")
    stored: dict[str, Any] = {"weight": object(), "wrong": object()}
    found = match(nn.Linear(2, 2), ["weight", "bias"], stored)
    assert found.sources == {"weight": stored["weight"]}
    assert found.unexpected == ["wrong"]
    assert not found.optional
