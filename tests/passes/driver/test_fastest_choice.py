"""The fastest choice that a search found becomes the plan, which lists the step times of known recipes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.ir.cluster_mesh import ClusterMesh
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import UNKNOWN
from autoshard.ir.recipe import Recipe
from cost_models.hardware import Cluster
from passes.driver import fastest_choice
from passes.driver.fastest_choice import fastest
from passes.driver.plan_and_lower import plan_program, planning_problem, solve
from passes.driver.plan_of_choice import LoweredPlan, lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.planning.baselines import MEGATRON, ZERO_1
from passes.solver.search_control import SearchControl
from tests.passes.blocks import Block, blocks_program, h100s

DATA, FSDP = "data parallel", "fully sharded data parallel"
RECIPES = {
    Mesh({"data": 4}): {
        DATA: Recipe(data=4, zero=0, micro_batch=128),
        ZERO_1: Recipe(data=4, zero=1, micro_batch=128),
        FSDP: Recipe(data=4, zero=3, micro_batch=128),
    },
    Mesh({"data": 2, "model": 2}): {
        MEGATRON: Recipe(data=2, zero=0, tensor=2, sequence_parallel=False, micro_batch=256)
    },
}
"""Known recipes on a mesh, each with the constraints that produce the recipe; 512 samples in one micro-batch."""


def plan_of(target: Cluster | ClusterMesh | Mesh, width: int = 64, **asked: Any) -> Plan:
    """The plan of a training step of two blocks, with a batch of 512 rows."""
    with torch.device("meta"):
        model, rows = nn.Sequential(*(Block(width) for _ in range(2))), torch.empty(512, width)
    return autoshard.plan(
        model, target, example_inputs=(rows,), optimizer="adamw", precision=None,
        loss_fn=lambda out: out.square().mean(), **asked,
    )  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", RECIPES, ids=str)
@pytest.mark.parametrize(("hardware", "width"), [("h100_sxm", 64), ("h100_sxm", 1024), (None, 64)])
def test_no_known_recipe_is_faster_than_the_plan(hardware: str | None, width: int, mesh: Mesh) -> None:
    """Each listed recipe has the step time of a plan made with this recipe, and none is faster than the chosen plan."""
    target = mesh if hardware is None else ClusterMesh(Cluster(hardware, 1, 4), mesh)
    plan = plan_of(target, width)
    assert plan.baselines.keys() >= RECIPES[mesh].keys()
    steps = {name: seconds for name, seconds in plan.baselines.items() if seconds is not None}
    assert min(steps.values()) >= plan.predicted.step_time_s
    for name, recipe in RECIPES[mesh].items():
        asked = plan_of(target, width, recipe=recipe, global_batch=512)
        assert asked.predicted.step_time_s == pytest.approx(steps[name], rel=1e-2), name


def noting(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list to which every choice that is lowered from now on is appended."""
    lowered: list[object] = []

    def lower(*arguments: object) -> LoweredPlan:
        lowered.append(arguments[1])
        return lowered_plan(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fastest_choice, "lowered_plan", lower)
    return lowered


def test_recipes_that_are_far_slower_are_lowered_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow recipe is lowered once, when its step time is first read.

    A pickled plan keeps only the step times that were read.
    """
    lowered = noting(monkeypatch)
    monkeypatch.setattr(fastest_choice, "_NEAR", -1.0)
    plan = plan_of(ClusterMesh(Cluster("h100_sxm", 1, 4), Mesh({"data": 4})))
    count = len(lowered)
    assert ZERO_1 not in pickle.loads(pickle.dumps(plan)).baselines
    step_s = plan.baselines[ZERO_1]
    assert step_s is not None
    assert step_s > 1.2 * plan.predicted.step_time_s
    assert plan.baselines[ZERO_1] == step_s
    assert len(lowered) == count + 1
    assert pickle.loads(pickle.dumps(plan)).baselines[ZERO_1] == step_s
    assert plan.to_json()["baselines"].keys() == {DATA, ZERO_1, FSDP}
    assert len(lowered) == count + 3


def test_the_least_step_over_meshes_is_lowered_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning on several meshes lists slow recipes without lowering them. Reading the step times lowers them."""
    lowered = noting(monkeypatch)
    monkeypatch.setattr(fastest_choice, "_NEAR", -1.0)
    plan = plan_of(Cluster("h100_sxm", 1, 4))
    count = len(lowered)
    assert set(plan.baselines) >= {DATA, ZERO_1, FSDP}
    assert len(lowered) == count
    assert min(step for step in plan.baselines.values() if step is not None) >= plan.predicted.step_time_s
    assert len(lowered) > count


def test_recipes_that_time_is_up_for_are_left_out() -> None:
    """After the time limit, known recipes that may be faster than the plan are left out of its list.

    The plan is then one of the choices of the search itself.
    """
    mesh, cluster = Mesh({"data": 8}), h100s(Mesh({"data": 8}))
    program = blocks_program(batch=64, length=1024, hidden=4096, count=4)
    options = PlanOptions(state_bytes_per_parameter_byte=2)
    planning = planning_problem(program, mesh, cluster, options)
    found = solve(planning, options, {})
    over = replace(options, control=SearchControl.within(0.0))
    late, whole = (fastest(planning, found, cluster, each).plan for each in (over, options))
    assert late.baselines.keys() < whole.baselines.keys()
    assert late.objective in [each.solution.cost for each in found.searched]
    assert late.predicted.step_time_s >= whole.predicted.step_time_s


def test_what_another_mesh_beats_by_far_is_not_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the plan of another mesh is far faster, only the search's own choice is lowered on this mesh."""
    lowered = noting(monkeypatch)
    mesh = Mesh({"data": 4, "model": 2})
    program, cluster = blocks_program(batch=64, length=1024, hidden=4096), h100s(mesh)
    free = plan_program(program, mesh, cluster, PlanOptions())
    count = len(lowered)
    assert count > 1
    lowered.clear()
    elsewhere = replace(free, predicted=replace(free.predicted, step_time_s=0.5 * free.predicted.step_time_s))
    beaten = plan_program(
        program, mesh, cluster, PlanOptions(elsewhere=[replace(elsewhere, objective=2 * free.objective, baselines={})])
    )
    assert len(lowered) == 1
    assert beaten.predicted.step_time_s >= free.predicted.step_time_s


@pytest.mark.parametrize(
    ("hardware", "steps", "known_s", "chosen"),
    [
        ("cpu_laptop", [(1.0, 10), (0.985, 20)], [], 0),
        ("cpu_laptop", [(1.0, 10), (0.985, 20)], [0.985], 1),
        ("cpu_laptop", [(1.0, 10), (1.015, 5)], [1.015], 1),
        ("cpu_laptop", [(1.0, 10), (1.015, 5)], [1.0, 1.015], 0),
        ("cpu_laptop", [(1.0, 10), (0.9, 20)], [], 1),
        ("cpu_laptop", [(1.0, 10), (1.1, 5)], [], 0),
        ("h100_sxm", [(1.0, 10), (0.999, 20)], [], 1),
        ("h100_sxm", [(1.0, 10), (1.001, 5)], [1.001], 0),
    ],
)
def test_launches_decide_between_plans_as_fast_on_cpus(
    hardware: str, steps: list[tuple[float, int]], known_s: list[float], chosen: int
) -> None:
    """On CPUs, among plans within 2 % the plan with the fewest launches wins, unless a known recipe beats it."""
    made = [LoweredPlan(plan_with_step(seconds, launches)) for seconds, launches in steps]
    cluster = Cluster(hardware, nodes=1, devices_per_node=2)
    assert fastest_choice._fastest_of(made, known_s, cluster) is made[chosen]


def plan_with_step(seconds: float, launches: int) -> Plan:
    """An empty plan with a step time in seconds and a number of launches."""
    return Plan(
        mesh=Mesh({"x": 2}), program_digest="", inputs={}, nodes={}, outputs={}, parameters={}, objective=1.0,
        predicted=replace(UNKNOWN, step_time_s=seconds, launches=launches), lower_bound=None, search_time_s=0.0,
        hardware="",
    )  # fmt: skip
