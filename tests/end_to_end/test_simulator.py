"""Models of transformers on simulated meshes train as on one device."""

from __future__ import annotations

import pytest
import torch

import autoshard
from autoshard import Mesh
from tests.end_to_end.layouts import layouts
from tests.end_to_end.training import FLOOR, RELATIVE, Training, assert_equal, train
from tests.models import MODELS

MESHES = [
    Mesh({"model": 4}),
    pytest.param(Mesh({"data": 2, "model": 2}), marks=pytest.mark.slow),
    Mesh({"data": 2, "context": 2, "model": 2}),
]
SQUARE = Mesh({"data": 2, "model": 2})
LAYERS = 2


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest) -> tuple[str, Training]:
    """Return the name of a model and its training of two layers on one device."""
    model, inputs = MODELS[request.param](LAYERS)
    return request.param, train(model, inputs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_training_equals_one_device(reference: tuple[str, Training], mesh: Mesh) -> None:
    """Under the planner's plan, loss, gradients, and parameters after three steps of AdamW equal one device."""
    name, expected = reference
    model, inputs = MODELS[name](LAYERS)
    assert_equal(train(autoshard.compile(model, mesh), inputs), expected)


_ALONE = [pytest.param(name, marks=pytest.mark.slow) for name in ("data", "tensor")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["data and tensor", "fully sharded", *_ALONE])
def test_experts_layouts_equal_one_device(reference: tuple[str, Training], layout: str) -> None:
    """Training under data, tensor, and fully sharded layouts, and under a mix, equals one device."""
    name, expected = reference
    model, inputs = MODELS[name](LAYERS)
    constraints = layouts(name)[layout]
    sharded = autoshard.compile(model, SQUARE, constraints=constraints)
    assert_equal(train(sharded, inputs), expected)
    assert set(constraints.values()) <= {*sharded.specs.values(), autoshard.P("data")}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_torchs_own_eps_enlarges_rounding_alone(name: str) -> None:
    """With AdamW's default eps, at most 0.2 % of elements exceed the tolerance, by at most 1 % of the learning rate.

    The tolerance is 1e-5 of each element, and at least 1e-6. One device with the batch in reverse order exceeds it too.
    At lr=1e-3 it does in 1 of the 27,520 elements of this small GPT-2, and at lr=1e-2 in 56, by up to 2.8e-5. In exact
    arithmetic the gradients of these elements are zero (see `train`).
    """
    model, inputs = MODELS[name]()
    sharded = autoshard.compile(model, SQUARE, constraints=layouts(name)["data and tensor"])
    found = train(sharded, inputs, lr=1e-3, eps=1e-8).parameters
    expected = train(MODELS[name]()[0], inputs, lr=1e-3, eps=1e-8).parameters
    off = [(found[key] - value).abs() for key, value in expected.items()]
    promised = [(RELATIVE * value.abs()).clamp(min=FLOOR) for value in expected.values()]
    missed = sum(int((a > b).sum()) for a, b in zip(off, promised, strict=True))
    assert missed <= 0.002 * sum(value.numel() for value in expected.values())
    assert max(float(difference.max()) for difference in off) <= 0.01 * 1e-3


def test_evaluation_and_training_alternate() -> None:
    """After a training call, gradients and the logits of an evaluation equal one device."""
    model, inputs = MODELS["gpt2"]()
    plain, _ = MODELS["gpt2"]()
    sharded = autoshard.compile(model, SQUARE, constraints=layouts("gpt2")["tensor"])
    sharded(**inputs)["loss"].backward()
    plain(**inputs)["loss"].backward()
    sharded.eval()
    plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(sharded(**inputs)["logits"], plain(**inputs)["logits"], rtol=1e-5, atol=1e-6)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(sharded.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-6)
