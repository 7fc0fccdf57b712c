"""Matching of the files' tensors with the model's."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from autoshard.runtime.weights.weight_names import match


def test_tensors_of_a_plain_model_have_its_names() -> None:
    """Other tensors are named as unexpected; transformers renames tensors only for its own models."""
    pytest.importorskip("transformers")
    stored: dict[str, Any] = {"weight": object(), "wrong": object()}
    found = match(nn.Linear(2, 2), ["weight", "bias"], stored)
    assert found.sources == {"weight": stored["weight"]}
    assert found.unexpected == ["wrong"]
    assert not found.optional
