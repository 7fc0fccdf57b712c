"""The planner between `compile` and the passes."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard import NotAvailableError, P
from autoshard.ir.mesh import Mesh
from autoshard.ir.request import Request
from autoshard.runtime.engine import SimulatorEngine
from autoshard.tracing import trace
from passes.driver.planner import Planner
from passes.planning.baselines import HSDP, MEGATRON
from tests.passes.deep import batch, summed


def test_the_log_says_how_long_a_compile_took(caplog: pytest.LogCaptureFixture) -> None:
    """Seconds of the compile alone: no more than pass around it."""
    model, x, start = nn.Linear(4, 4), torch.randn(2, 4), time.perf_counter()
    with caplog.at_level(logging.INFO, logger="passes.driver.planner"):
        autoshard.compile(model, Mesh({"data": 2}), example_inputs=(x,))(x)
    (record,) = (record for record in caplog.records if record.message.startswith("compiled"))
    assert isinstance(record.args, tuple)
    assert 0 < record.args[2] <= time.perf_counter() - start  # type: ignore[operator]


def test_an_axis_of_one_device_leaves_the_memory_as_it_is() -> None:
    """Only axes along which devices talk have communicators, which take memory."""
    program = trace(nn.Linear(4, 4), (torch.randn(2, 4),))
    planner = Planner(cluster=autoshard.Cluster.of("h100_sxm", 8, devices_per_node=8))
    alone, beside, both = (
        planner._options(program, Mesh(sizes), {}).memory_budget
        for sizes in ({"data": 8}, {"data": 8, "model": 1}, {"data": 4, "model": 2})
    )
    assert alone == beside > both


def test_a_step_from_a_cuda_graph_is_predicted_without_its_host() -> None:
    """A step of small kernels takes the time of the host's launches alone."""
    program = trace(nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))), (torch.randn(2, 4),))
    planner = Planner(cluster=autoshard.Cluster.of("h100_sxm", 8, devices_per_node=8))
    eager, graph = (
        replace(planner, cuda_graph=cuda_graph).search_meshes(program, [Mesh({"data": 2})]).predicted.step_time_s
        for cuda_graph in (False, True)
    )
    assert graph < 0.8 * eager


def test_a_mesh_without_a_plan_leaves_the_others() -> None:
    """Only one of the meshes has the axis that a constraint names."""
    program = trace(nn.Linear(4, 4), (torch.randn(2, 4),))
    planner = Planner(constraints={"weight": P("model")}, time_budget_s=2.0)
    assert planner.search_meshes(program, [Mesh({"data": 2}), Mesh({"model": 2})]).mesh == Mesh({"model": 2})


def test_a_plan_of_the_best_mesh_tells_of_recipes_on_every_mesh() -> None:
    """HSDP and Megatron's have two axes, whichever mesh is chosen."""
    model, rows = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.empty(64, 64)
    cluster = autoshard.Cluster("h100_sxm", nodes=2, devices_per_node=2)
    plan = autoshard.plan(model, cluster, example_inputs=(rows,))
    assert set(plan.baselines) == {"data parallel", "fully sharded data parallel", HSDP, MEGATRON}


def test_a_plan_for_another_mesh_is_made_anew() -> None:
    """A plan that was made for one mesh runs on no other."""
    request = Request(nn.Linear(4, 4), (torch.randn(2, 4),), {}, grad=True)
    two, four = (SimulatorEngine(Mesh({"data": size}), torch.device("cpu")) for size in (2, 4))
    made = Planner()(request, two).plan
    assert Planner(made=made)(request, two).plan is made
    assert Planner(made=made)(request, four).plan.mesh == four.mesh


def test_a_plan_that_is_given_is_kept() -> None:
    """Also one that no search would find: both ranks compute all of it."""
    model, inputs, mesh = nn.Linear(256, 256), (torch.randn(1024, 256),), Mesh({"data": 2})
    alike = autoshard.plan(model, mesh, example_inputs=inputs, constraints={"*": P()})
    assert alike.nodes != autoshard.plan(model, mesh, example_inputs=inputs).nodes
    assert autoshard.compile(model, mesh, plan=alike, example_inputs=inputs).plan.nodes == alike.nodes


def test_a_deep_model_of_unlike_blocks_is_planned_in_time_or_not_at_all() -> None:
    """All of its blocks are traced, and their specs searched, only where there is time, if that is asked for."""
    request = Request(summed(8), batch(), {}, grad=True)
    planner = Planner(time_budget_s=1.0)
    with pytest.raises(NotAvailableError, match=r"all blocks, which are not alike, would take some 2 s"):
        planner.plan_call(request, [Mesh({"data": 2})], in_time=True)
    assert not planner.plan_call(request, [Mesh({"data": 2})])[1].repeats
