"""The masks of dropout do not depend on the plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh, P, PartitionSpec
from autoshard.testing import check_plan
from autoshard.testing.training import drawing_alike
from tests.end_to_end.layouts import layouts
from tests.end_to_end.training import assert_equal, train
from tests.models import MODELS

SQUARE = Mesh({"data": 2, "model": 2})


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_training_with_dropout_equals_a_mesh_of_one(name: str) -> None:
    """The same seed gives the same masks under data and tensor parallelism as on one rank."""
    trainings = []
    for mesh, layout in ((Mesh({"data": 1, "model": 1}), "chosen"), (SQUARE, "data and tensor")):
        model, inputs = MODELS[name](dropout=0.2)
        sharded = autoshard.compile(model, mesh, constraints=layouts(name)[layout])
        torch.manual_seed(7)
        trainings.append(train(sharded, inputs))
    assert_equal(trainings[1], trainings[0])


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_plans_of_models_with_dropout_are_compared_with_its_masks(precision: str | None) -> None:
    """`check_plan` draws the masks of the ranks on one device, and each step draws new masks."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), torch.ones(4, 8)
    assert check_plan(model, SQUARE, (x,), steps=3, precision=precision).is_equal
    with drawing_alike(torch.tensor(1)):
        first, again = model(x), model(x)
    with drawing_alike(torch.tensor(1)):
        assert torch.equal(model(x), first)
    assert not torch.equal(first, again)


@pytest.mark.parametrize("spec", [P(), P("data", "model"), P(("data", "model"))], ids=str)
def test_keep_rate_and_scale(spec: PartitionSpec) -> None:
    """Dropout keeps 1 - p of the elements, scaled by 1 / (1 - p), and the gradient has the same mask."""
    torch.manual_seed(3)
    sharded = autoshard.compile(nn.Dropout(0.25), SQUARE, constraints={"input:0": spec})
    x = torch.ones(200, 100, requires_grad=True)
    y = sharded(x)
    y.sum().backward()
    kept = y != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.02
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / 0.75))
    torch.testing.assert_close(x.grad, y.detach())
