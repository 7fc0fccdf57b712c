"""`plan(previous=)` of specs: a known plan is where the search begins."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard import Cluster, Mesh, Plan, PlanMismatchError

CLUSTER, LINE, SQUARE = Cluster("h100_sxm", 1, 4), Mesh({"data": 4}), Mesh({"data": 2, "model": 2})


class Model(nn.Module):
    """Products with recomputable values in between."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x)).sin()
        return x.square().mean()


def make_plan(width: int = 512, mesh: Mesh = LINE, **options: Any) -> Plan:
    with torch.device("meta"):
        model, x = Model(width), torch.empty(16384, width)
    asked = {"time_budget_s": 20.0, **options}
    return autoshard.plan(model, CLUSTER.mesh(mesh), example_inputs=(x,), optimizer="adamw", **asked)


@cache
def tight() -> Plan:
    """A plan that recomputes or offloads."""
    plan = make_plan(memory_budget=int(0.7 * make_plan().predicted.peak_memory_bytes))
    assert plan.recompute.nodes or plan.offload.nodes
    return plan


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", [1.0, 1.1, 1.25])
def test_more_memory_is_never_slower(more: float) -> None:
    """More memory is never slower, also without time to search."""
    budget = int(more * (tight().memory_budget or 0))
    found = make_plan(memory_budget=budget, previous=tight(), time_budget_s=0.0)
    assert found.objective <= tight().objective * (1 + 1e-9)
    assert found.predicted.step_time_s <= tight().predicted.step_time_s * (1 + 1e-9)
    assert found.predicted.peak_memory_bytes <= budget


def test_a_plan_of_another_mesh_is_a_choice() -> None:
    """An earlier plan of another mesh is a baseline, and the new plan is at least as fast."""
    found = make_plan(mesh=SQUARE, previous=make_plan())
    there = found.baselines["the plan before"]
    assert there is not None
    assert found.predicted.step_time_s <= there * (1 + 1e-9)


@pytest.mark.slow
def test_limits_are_never_slower_than_the_plan() -> None:
    """Plans with more memory, a faster network or device are never slower than the present plan."""
    plan = make_plan(memory_budget=tight().memory_budget, previous=tight(), time_budget_s=0.1)
    found = plan.limits()
    chosen_s = found.chosen.step_time_s
    assert chosen_s is not None
    assert all(item.step_time_s is not None and item.step_time_s <= chosen_s for item in found.variants)


def test_a_plan_of_another_model_is_refused() -> None:
    """A plan of another model is refused with the name of a parameter."""
    message = r"previous= is of another model: its parameter 'layers.0.weight' has shape=\(512, 512\), and"
    with pytest.raises(PlanMismatchError, match=message):
        make_plan(width=256, previous=tight())
