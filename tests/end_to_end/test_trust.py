"""A compiled model can be verified again, and generated kernels keep its results."""

from __future__ import annotations

import pytest
import torch

import autoshard
from autoshard import Mesh
from tests.models import Perceptron


def test_a_compiled_model_verifies() -> None:
    """A compiled model verifies with a report of its nodes and rules, and so does a training step."""
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
    """The message says to call the model first."""
    with pytest.raises(autoshard.TraceError, match="nothing has been compiled yet; call the model once"):
        autoshard.verify(autoshard.compile(Perceptron(), Mesh({"x": 2})))
