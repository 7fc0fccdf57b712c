"""`plan.explain` shows the kernels that are generated for what is asked of."""

from __future__ import annotations

import torch
from torch import nn

import autoshard
from autoshard import Cluster, Mesh
from tests.passes.questions.test_explain import make_plan


class Scaled(nn.Module):
    """A sum of squares of scaled values, which no hand-written kernel takes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x * self.scale) * x).square().sum()


def test_groups_are_shown() -> None:
    """A parameter's explanation names the kernel that reads it, what that stands for and what it saves; JSON too."""
    cluster = Cluster("h100_sxm", nodes=1, devices_per_node=2)
    plan = autoshard.plan(Scaled(), cluster, mesh=Mesh({"x": 2}), example_inputs=(torch.ones(8, 16),))
    found = plan.explain("scale")
    assert found.kernels
    assert "mul, tanh, mul_1, pow_1, sum_1" in found.kernels[0]
    assert "(forward)" in found.kernels[0]
    assert "less to move" in str(found)
    assert found.to_json()["kernels"] == list(found.kernels)


def test_products_are_in_no_group() -> None:
    """Nothing is generated for a table that is only looked up."""
    assert make_plan().explain("table.weight").kernels == ()
