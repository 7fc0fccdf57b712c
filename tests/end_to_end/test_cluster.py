"""Given a cluster instead of a mesh, the planner picks the mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Recipe
from autoshard.cluster import distinct_meshes, local_cluster
from autoshard.errors import NotAvailableError
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from passes.driver import planner
from passes.driver.candidates import meshes_for
from tests.end_to_end.test_pipelines import NORM, STEPS, adamw, on_one_device, skips
from tests.runtime.processes import on_processes


def test_each_mesh_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate mesh is planned once, and the plan by which the mesh was chosen is the plan that runs."""
    meshes, planned = [], []

    def plan_program(program: Program, mesh: Mesh, *args: Any) -> autoshard.Plan:
        meshes.append(mesh)
        planned.append(original(program, mesh, *args))
        return planned[-1]

    original = planner.plan_program
    monkeypatch.setattr(planner, "plan_program", plan_program)
    cluster = autoshard.Cluster("cpu_laptop", 1, 4)
    model, x = nn.Linear(8, 8), torch.randn(8, 8)
    sharded = autoshard.compile(model, cluster, example_inputs=(x,))
    assert set(meshes) == set(distinct_meshes(meshes_for(autoshard.Recipe(), cluster), cluster))
    assert len(meshes) == 2
    chosen = replace(sharded.plan, baselines={}, search_time_s=0.0)
    assert chosen in [replace(plan, baselines={}, search_time_s=0.0) for plan in planned]
    assert sharded.plan.search_time_s >= sum(plan.search_time_s for plan in planned)
    torch.testing.assert_close(sharded(x), nn.functional.linear(x, model.weight, model.bias))
    assert len(meshes) == 2


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (1, [{"data": 8}, {"data": 4, "model": 2}]),
        (2, [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4}]),
    ],
)
def test_meshes_of_other_names_are_one(nodes: int, expected: list[dict[str, int]]) -> None:
    """Meshes 4x2 and 2x4 are one candidate on one node, and two candidates on two nodes."""
    cluster = autoshard.Cluster("h100_sxm", nodes, 8 // nodes)
    assert distinct_meshes(meshes_for(autoshard.Recipe(), cluster), cluster) == [Mesh(axes) for axes in expected]
    assert distinct_meshes([Mesh({"b": 1, "a": 8}), Mesh({"a": 8})], cluster) == [Mesh({"b": 1, "a": 8})]


def test_a_cluster_is_put_together_from_parts() -> None:
    """`Cluster.of` describes unnamed hardware, such as 64 A100 40GB on RoCE with 200 Gbit/s each."""
    cluster = autoshard.Cluster.of(
        "a100_sxm_40gb", 64, devices_per_node=8, network="roce_v2", network_bytes_per_s_per_device=25e9
    )
    assert isinstance(cluster, autoshard.Cluster)
    assert (cluster.size, cluster.nodes, cluster.device.name) == (64, 8, "a100_sxm_40gb")
    assert cluster.node.inter is not None
    assert cluster.node.inter.bandwidth_bytes_per_s == 25e9
    assert autoshard.Cluster.of("l4", 2, devices_per_node=8).devices_per_node == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h900", 8), "h900"),
        (("a100_sxm_40gb", 12), "12 devices"),
        (("a100_sxm_40gb", 16), "no network"),
    ],
)
def test_parts_that_do_not_exist_are_named(arguments: tuple[str, int], message: str) -> None:
    """An unknown device, an impossible device count and a missing network raise `UnknownHardwareError`."""
    with pytest.raises(autoshard.UnknownHardwareError, match=message):
        autoshard.Cluster.of(*arguments, devices_per_node=8)


@pytest.mark.parametrize(
    ("driver", "node"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100_sxm_40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm_80gb"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie_80gb"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA GB200", "gb200_nvl72"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GB300", "gb300_nvl72"),
        ("Tesla V100-SXM2-16GB", "aws_p3_16xlarge"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_this_machine_is_known_by_its_driver(monkeypatch: pytest.MonkeyPatch, driver: str, node: str) -> None:
    """The driver's device name selects the node type, and the longer name wins, so an L40S is not an L4."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: driver)
    monkeypatch.setattr("autoshard.cluster.world_size", lambda: 4)
    assert local_cluster(autoshard.Mesh({"data": 4})).node.name == node


@pytest.mark.parametrize("driver", ["NVIDIA L40", "NVIDIA GH200 480GB"])
def test_a_machine_that_no_file_describes_is_refused(monkeypatch: pytest.MonkeyPatch, driver: str) -> None:
    """Only whole words of the driver's device name match, so an L40 is not an L4, nor a GH200 an H200."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: driver)
    monkeypatch.setattr("autoshard.cluster.world_size", lambda: 4)
    with pytest.raises(
        NotAvailableError, match=f"No hardware file describes '{driver}'; there are .*Or pass a Cluster"
    ):
        local_cluster(autoshard.Mesh({"data": 4}))


def test_a_host_of_more_gpus_than_its_node_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without LOCAL_WORLD_SIZE, 16 ranks count as one host, which is refused for a node type of 8 GPUs."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("autoshard.cluster.world_size", lambda: 16)
    with pytest.raises(NotAvailableError, match=r"1 to 8 devices in each, .*Or pass a Cluster"):
        local_cluster(autoshard.Mesh({"data": 16}))


CLUSTER = autoshard.Cluster("cpu_laptop", 1, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", [None, Recipe(pipeline=2)], ids=["free", "pipeline"])
def test_a_cluster_trains_as_one_device(recipe: Recipe | None) -> None:
    """A model compiled for a cluster trains as on one device, with the stages and micro-batches of its plan."""
    model, inputs = skips()
    step = autoshard.compile(
        model, CLUSTER, optimizer=adamw(model), example_inputs=inputs, max_grad_norm=NORM, recipe=recipe
    )
    assert bool(step.plan.stages) == (recipe is not None)
    assert step.micro_batches == step.plan.micro_batches
    torch.testing.assert_close([step(**inputs) for _ in range(STEPS)], on_one_device("skips").losses)


@pytest.mark.slow
def test_compile_finds_what_plan_finds_for_a_batch() -> None:
    """`compile` and `plan` take the global batch from the example inputs, and find the same plan."""
    model, inputs = skips()
    asked: dict[str, Any] = {"example_inputs": inputs, "max_grad_norm": NORM, "precision": None}
    cluster = autoshard.Cluster("h100_sxm", 1, 4)
    plans = [
        autoshard.plan(model, cluster, optimizer=adamw(model), **asked, **batch) for batch in ({}, {"global_batch": 8})
    ]
    step = autoshard.compile(model, cluster, optimizer=adamw(model), **asked)
    found = [(plan.mesh, plan.micro_batches, plan.predicted.step_time_s) for plan in (*plans, step.plan)]
    assert found[0] == found[1] == found[2]


def check_stages_of_a_cluster() -> None:
    """Two processes that run one pipeline stage each, as planned for a cluster, train as one device."""
    model, inputs = skips()
    step = autoshard.compile(
        model, CLUSTER, optimizer=adamw(model), example_inputs=inputs, max_grad_norm=NORM, recipe=Recipe(pipeline=2)
    )
    assert len(step.plan.stages) == 2
    torch.testing.assert_close([step(**inputs) for _ in range(STEPS)], on_one_device("skips").losses)


test_stages_of_a_cluster_run_in_processes = on_processes({"stages": check_stages_of_a_cluster}, ranks=2)
