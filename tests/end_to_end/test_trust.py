"""A compiled model can be verified again."""

from __future__ import annotations

import pytest
import torch

import autoshard
from autoshard import Mesh
from tests.models import Perceptron


def test_a_compiled_model_verifies() -> None:
    """`verify` reports the nodes and rules of a compiled model and of a training step."""
    sharded = autoshard.compile(Perceptron(), Mesh({"x": 2}), example_inputs=(torch.randn(4, 8),))
    report = autoshard.verify(sharded)
    assert report.nodes > 10
    assert "aten.mm.default" in report.rules
    assert not report.assumptions
    model = Perceptron()
    step = autoshard.compile(model, Mesh({"x": 2}), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    step(torch.randn(4, 8))
    assert autoshard.verify(step).nodes > 10


def test_nothing_compiled_cannot_be_verified() -> None:
    """`verify` before the first call raises an error that says to call the model once."""
    with pytest.raises(autoshard.TraceError, match="nothing has been compiled yet; call the model once"):
        autoshard.verify(autoshard.compile(Perceptron(), Mesh({"x": 2})))
