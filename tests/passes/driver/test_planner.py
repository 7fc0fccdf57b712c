"""`Planner` chooses among meshes, keeps or replaces given plans, and logs the time of a compile."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import DoesNotFitError, P
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.request import Request
from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.engine import SimulatorEngine
from autoshard.tracing import trace
from passes.driver import plan_and_lower
from passes.driver import planner as planner_module
from passes.driver.planner import Planner
from passes.planning.baselines import HSDP, MEGATRON
from passes.planning.build_assignment import PlanningProblem
from passes.recomputation.fitting import JointSolution


def test_the_log_says_how_long_a_compile_took(caplog: pytest.LogCaptureFixture) -> None:
    """The log states the seconds of the compile, at most the time of the call."""
    model, x, start = nn.Linear(4, 4), torch.randn(2, 4), time.perf_counter()
    with caplog.at_level(logging.INFO, logger="passes.driver.planner"):
        autoshard.compile(model, Mesh({"data": 2}), example_inputs=(x,))(x)
    (record,) = (record for record in caplog.records if record.message.startswith("compiled"))
    assert isinstance(record.args, tuple)
    assert 0 < record.args[2] <= time.perf_counter() - start  # type: ignore[operator]


def test_an_axis_of_one_device_leaves_the_memory_as_it_is() -> None:
    """An axis of one device takes no memory for communicators, while a second axis of two devices does."""
    program = trace(nn.Linear(4, 4), (torch.randn(2, 4),))
    planner = Planner(cluster=autoshard.Cluster.of("h100_sxm", 8, devices_per_node=8))
    alone, beside, both = (
        planner._options(program, Mesh(sizes), {}).memory_budget
        for sizes in ({"data": 8}, {"data": 8, "model": 1}, {"data": 4, "model": 2})
    )
    assert alone == beside > both


def test_a_step_from_a_cuda_graph_is_predicted_without_its_host() -> None:
    """A step of small kernels is predicted over 20 % shorter as a CUDA graph, which needs no launches by the host."""
    program = trace(nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))), (torch.randn(2, 4),))
    planner = Planner(cluster=autoshard.Cluster.of("h100_sxm", 8, devices_per_node=8))
    eager, graph = (
        replace(planner, cuda_graph=cuda_graph).search_meshes(program, [Mesh({"data": 2})]).predicted.step_time_s
        for cuda_graph in (False, True)
    )
    assert graph < 0.8 * eager


def test_a_mesh_without_a_plan_leaves_the_others() -> None:
    """A mesh without a plan, here without the axis of a constraint, is skipped, and the other mesh is planned."""
    program = trace(nn.Linear(4, 4), (torch.randn(2, 4),))
    planner = Planner(constraints={"weight": P("model")}, time_budget_s=2.0)
    assert planner.search_meshes(program, [Mesh({"data": 2}), Mesh({"model": 2})]).mesh == Mesh({"model": 2})


def test_a_plan_of_the_best_mesh_tells_of_recipes_on_every_mesh() -> None:
    """The plan lists the known recipes of all meshes, also HSDP and Megatron, which need two axes."""
    model, rows = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.empty(64, 64)
    cluster = autoshard.Cluster("h100_sxm", nodes=2, devices_per_node=2)
    plan = autoshard.plan(model, cluster, example_inputs=(rows,))
    assert set(plan.baselines) == {"data parallel", "fully sharded data parallel", HSDP, MEGATRON}


def test_a_plan_for_another_mesh_is_made_anew() -> None:
    """The planner keeps a made plan on its own mesh, and makes a new plan on another mesh."""
    request = Request(nn.Linear(4, 4), (torch.randn(2, 4),), {}, grad=True)
    two, four = (SimulatorEngine(Mesh({"data": size}), torch.device("cpu")) for size in (2, 4))
    made = Planner()(request, two).plan
    assert Planner(made=made)(request, two).plan is made
    assert Planner(made=made)(request, four).plan.mesh == four.mesh


def test_a_plan_that_is_given_is_kept() -> None:
    """`compile` keeps a given plan, even a plan that no search would choose."""
    model, inputs, mesh = nn.Linear(256, 256), (torch.randn(1024, 256),), Mesh({"data": 2})
    alike = autoshard.plan(model, mesh, example_inputs=inputs, constraints={"*": P()})
    assert alike.nodes != autoshard.plan(model, mesh, example_inputs=inputs).nodes
    assert autoshard.compile(model, mesh, plan=alike, example_inputs=inputs).plan.nodes == alike.nodes


@pytest.mark.parametrize(
    ("nodes", "constraints", "searched"),
    [
        (1, {}, [{"data": 4}, {"data": 2, "model": 2}]),
        (2, {}, [{"data": 4}, {"data": 2, "model": 2}]),
        (1, {"0.weight": P("model")}, [{"data": 2, "model": 2}, {"model": 4}]),
    ],
)
def test_a_mesh_under_another_name_is_searched_once(
    nodes: int, constraints: dict[str, PartitionSpec], searched: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two meshes of equal shape are searched once unless constraints name their axes."""
    meshes, plan_on = [], planner_module.plan_program

    def counted(program: Program, mesh: Mesh, *others: Any) -> Plan:
        meshes.append(mesh)
        return plan_on(program, mesh, *others)

    monkeypatch.setattr(planner_module, "plan_program", counted)
    model, rows = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.empty(64, 64)
    cluster = autoshard.Cluster("h100_sxm", nodes=nodes, devices_per_node=4 // nodes)
    autoshard.plan(model, cluster, example_inputs=(rows,), constraints=constraints)
    assert sorted(map(str, meshes)) == sorted(str(Mesh(axes)) for axes in searched)


def test_a_mesh_ends_at_its_first_bound_above_the_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh whose lower bound exceeds the cost of the best plan is not searched, but its known recipes are listed."""
    searched, search = [], plan_and_lower.solve_jointly

    def counted(planning: PlanningProblem, *others: Any, **options: Any) -> JointSolution:
        searched.append(planning.space.mesh)
        return search(planning, *others, **options)

    monkeypatch.setattr(plan_and_lower, "solve_jointly", counted)
    model, rows = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.empty(4096, 64)
    cluster = autoshard.Cluster("h100_sxm", nodes=2, devices_per_node=2)
    plan = autoshard.plan(model, cluster, example_inputs=(rows,))
    assert [plan.mesh] == searched == [Mesh({"data": 4})]
    assert {HSDP, MEGATRON} <= set(plan.baselines)


def test_what_time_ended_before_anything_fitted_says_so() -> None:
    """If time ends a search before any plan fits, the error says so. Otherwise the error says that no plan fits."""
    model, rows = nn.Linear(64, 64), torch.empty(64, 64)
    asked: dict[str, Any] = {"example_inputs": (rows,), "memory_budget": 1}
    with pytest.raises(DoesNotFitError, match=r"^time_budget_s=0 was up before the search ended\. No plan was found"):
        autoshard.plan(model, Mesh({"data": 2}), time_budget_s=0.0, **asked)
    with pytest.raises(DoesNotFitError, match=r"^No plan was found that fits"):
        autoshard.plan(model, Mesh({"data": 2}), **asked)
