"""Models from transformers on simulated meshes train exactly as on one device."""

from __future__ import annotations

import pytest

import autoshard
from autoshard import Mesh
from tests.end_to_end.models import MODELS
from tests.end_to_end.training import Training, assert_equal, train

MESHES = [Mesh({"model": 4}), Mesh({"data": 2, "model": 2}), Mesh({"data": 2, "context": 2, "model": 2})]


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest) -> tuple[str, Training]:
    """What one device computes."""
    model, inputs = MODELS[request.param]()
    return request.param, train(model, inputs)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_training_equals_one_device(reference: tuple[str, Training], mesh: Mesh) -> None:
    """Loss, gradients, and parameters after 3 steps of AdamW."""
    name, expected = reference
    model, inputs = MODELS[name]()
    assert_equal(train(autoshard.compile(model, mesh), inputs), expected)
