"""Unusual arguments that are right are accepted."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from torch import nn

import autoshard
from autoshard import Cluster, Mesh
from tests.test_arguments_refused import Mysterious

MESH = Mesh({"data": 2})
X = torch.ones(4, 6)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 2)


def test_a_call_that_a_model_does_not_take() -> None:
    """A call works if a pre-hook drops an argument that the module does not take, or a wrapper takes more
    arguments than the module."""
    model = small()
    model.register_forward_pre_hook(lambda _, args: args[:1])
    assert autoshard.compile(model, MESH)(X, 3).shape == (4, 2)
    inner = small()
    model = nn.Identity()
    model.forward = functools.wraps(inner.forward)(lambda *args, **kwargs: inner(args[0] * kwargs["scale"]))
    assert autoshard.compile(model, MESH)(X, scale=2.0).shape == (4, 2)


def test_whole_numbers_of_numpy(tmp_path: Path) -> None:
    """Numbers of micro-batches and of sequences may be NumPy's, and the plan can be saved."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters())
    step = autoshard.compile(
        model, MESH, example_inputs=(X,), optimizer=optimizer, loss_fn=lambda y: y.sum(), micro_batches=np.int64(2)
    )
    step.plan.save(tmp_path / "plan.json")
    assert autoshard.Plan.load(tmp_path / "plan.json").micro_batches == 2
    cluster = Cluster("h100_sxm", nodes=1, devices_per_node=2)
    arguments = {"example_inputs": (X,), "loss_fn": lambda y: y.sum(), "global_batch": np.int64(8)}
    autoshard.plan(small(), cluster, optimizer="sgd", **arguments).save(tmp_path / "plan.json")


def test_whole_numbers_of_bytes() -> None:
    """A memory budget of 8e9, or of a NumPy number, becomes a whole number of bytes."""
    budgets = [8 * 10**9, 8e9, np.int64(8 * 10**9), np.float64(8e9)]
    plans = [autoshard.plan(small(), MESH, example_inputs=(X,), memory_budget=budget) for budget in budgets]
    assert [(plan.memory_budget, type(plan.memory_budget)) for plan in plans] == [(8 * 10**9, int)] * 4


def test_an_optimizer_with_a_schedule() -> None:
    """An optimizer whose `step` a schedule has wrapped is accepted."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    autoshard.compile(model, MESH, optimizer=optimizer)


def test_plans_are_for_the_hardware_that_is_given() -> None:
    """With `cluster=`, the plan of a mesh is for this hardware rather than for this machine."""
    given = Cluster("h100_sxm", 1, 2)
    sharded = autoshard.compile(nn.Linear(4, 2), Mesh({"data": 2}), cluster=given, example_inputs=(torch.ones(4, 4),))
    assert sharded.plan is not None
    assert sharded.plan.hardware == given.name


def test_a_fixed_plan_runs_its_model(tmp_path: Path) -> None:
    """A plan that was saved and loaded gives the model's results, with gradients and without."""
    autoshard.plan(small(), MESH, example_inputs=(X,), precision=None).save(tmp_path / "plan.json")
    sharded = autoshard.compile(small(), MESH, plan=tmp_path / "plan.json")
    torch.testing.assert_close(sharded(X), small()(X))
    with torch.no_grad():
        torch.testing.assert_close(sharded(torch.ones(8, 6)), small()(torch.ones(8, 6)))


def test_a_plan_for_another_mesh_is_where_the_search_starts() -> None:
    """A plan for another mesh is where the search starts. The found plan is at least as fast, and lists the old
    plan as a baseline."""
    model, mesh = small(), Mesh({"data": 4})
    plan = autoshard.plan(small(), MESH, example_inputs=(X,), precision=None)
    sharded = autoshard.compile(model, mesh, plan=plan, example_inputs=(X,))
    assert isinstance(sharded, autoshard.ShardedModule)
    found = sharded.plan
    assert found is not None
    assert found.mesh == mesh
    before = found.baselines["the plan before"]
    assert before is not None
    assert found.predicted.step_time_s <= before
    torch.testing.assert_close(sharded(X), model(X))


def test_without_strict_such_an_operator_runs_whole() -> None:
    """Without `strict=True`, an operator without a sharding rule runs whole on each rank, and the plan
    names its line."""
    sharded = autoshard.compile(Mysterious(), MESH, example_inputs=(X,))
    torch.testing.assert_close(sharded(X), Mysterious()(X))
    operators = sharded.plan.replicated_operators
    assert any("mystery" in name and "test_arguments_refused.py" in line for name, line in operators)


def test_a_model_on_meta_can_be_planned() -> None:
    with torch.device("meta"):
        model = small()
    plan = autoshard.plan(model, MESH, example_inputs=(X,), optimizer="adamw", loss_fn=lambda y: y.sum())
    assert plan.parameters["weight"].shape == (2, 6)
