"""Bags of equal size are traced row by row, so that ranks split them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard

CASES: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "sum with padding": {"mode": "sum", "padding_idx": 1},
    "mean with padding": {"padding_idx": -11},
    "max with padding": {"mode": "max", "padding_idx": 1},
    "frequencies": {"mode": "sum", "scale_grad_by_freq": True},
}


class Bags(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(12, 4, **options)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.table(x, per_sample_weights=weights).exp().mean()


def _assert_as_on_one_device(model: Bags, *args: Tensor) -> None:
    alone = copy.deepcopy(model)
    sharded = autoshard.compile(model, autoshard.Mesh({"data": 2}))
    for item in (sharded, alone):
        item(*args).backward()
    torch.testing.assert_close(sharded(*args), alone(*args))
    torch.testing.assert_close(model.table.weight.grad, alone.table.weight.grad)


@pytest.mark.parametrize("name", CASES)
def test_bags_of_rows_equal_one_device(name: str) -> None:
    """Loss and gradient equal one device's. One bag has padding only, and another bag an id twice."""
    ids = torch.tensor([[1, 1, 1], [0, 5, 5], [1, 3, 11], [7, 1, 2]])
    _assert_as_on_one_device(Bags(**CASES[name]), ids)


def test_weights_of_samples_get_a_gradient() -> None:
    """A weighted sum equals one device, also in the gradient of the weights."""
    ids, weights = torch.randint(0, 12, (4, 3)), torch.randn(4, 3, requires_grad=True)
    gradients = []
    for wrap in (lambda model: model, lambda model: autoshard.compile(model, autoshard.Mesh({"data": 2}))):
        gradients += torch.autograd.grad(wrap(Bags(mode="sum"))(ids, weights), weights)
    torch.testing.assert_close(*gradients)
