"""`plan(previous=)`: the search begins at an earlier plan."""

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
    """Three linear layers with recomputable activations in between."""

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
    """A plan in 70 % of the memory of the fastest plan, which recomputes or offloads."""
    plan = make_plan(memory_budget=int(0.7 * make_plan().predicted.peak_memory_bytes))
    assert plan.recompute.nodes or plan.offload.nodes
    return plan


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", [1.0, 1.1, 1.25])
def test_more_memory_is_never_slower(more: float) -> None:
    """With the memory of an earlier plan or more, the new plan is never slower, even without time to search."""
    budget = int(more * (tight().memory_budget or 0))
    found = make_plan(memory_budget=budget, previous=tight(), time_budget_s=0.0)
    assert found.objective <= tight().objective * (1 + 1e-9)
    assert found.predicted.step_time_s <= tight().predicted.step_time_s * (1 + 1e-9)
    assert found.predicted.peak_memory_bytes <= budget


def test_a_plan_of_another_mesh_is_a_choice() -> None:
    """An earlier plan of another mesh is a baseline, and the new plan is at least as fast as this baseline."""
    found = make_plan(mesh=SQUARE, previous=make_plan())
    there = found.baselines["the plan before"]
    assert there is not None
    assert found.predicted.step_time_s <= there * (1 + 1e-9)


@pytest.mark.slow
def test_limits_are_never_slower_than_the_plan() -> None:
    """No variant of `plan.limits()`, with more memory or a faster network or device, is slower than the plan."""
    plan = make_plan(memory_budget=tight().memory_budget, previous=tight(), time_budget_s=0.1)
    found = plan.limits()
    chosen_s = found.chosen.step_time_s
    assert chosen_s is not None
    assert all(item.step_time_s is not None and item.step_time_s <= chosen_s for item in found.variants)


def test_a_plan_of_another_model_is_refused() -> None:
    """An earlier plan of another model is refused, and the error names a parameter with another shape."""
    message = r"previous= is of another model: its parameter 'layers.0.weight' has shape=\(512, 512\), and"
    with pytest.raises(PlanMismatchError, match=message):
        make_plan(width=256, previous=tight())
