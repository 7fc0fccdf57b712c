"""Known recipes, each of which restricts the search space of a training step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.cluster import Cluster
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import BEFORE
from autoshard.ir.program import InputKind
from autoshard.ir.spec import P
from autoshard.ir.update import Update, UpdateGroup, UpdateRule
from autoshard.kernels.optimizers import ADAM_HYPER
from autoshard.tracing import trace
from passes.driver.plan_and_lower import plan_program, planning_problem
from passes.driver.plan_options import PlanOptions
from passes.planning.baselines import EXPERT_PARALLEL, HSDP, MEGATRON, least_baselines, solve_baselines
from passes.planning.restrictions import matrices_of_experts
from passes.planning.search import Search
from tests.models import mixtral
from tests.passes.blocks import Perceptron, h100s
from tests.passes.deep import adamw

MESH = Mesh({"data": 4})
ADAM = UpdateRule("adam_update", ("exp_avg", "exp_avg_sq"), (True, False), ADAM_HYPER)


def test_recipes_of_a_whole_step_lay_out_state() -> None:
    """Data parallelism copies parameters and state, ZeRO-1 splits the state, and full sharding splits both.

    Each needs no more memory than the recipe before, and the plan is no slower than any of them.
    """
    model = Perceptron()
    update = Update("AdamW", (UpdateGroup(ADAM, tuple(name for name, _ in model.named_parameters())),))
    rows = torch.empty(8, 16, device="meta")
    program = trace(model, (rows, rows), update=update)
    planning = planning_problem(program, MESH, h100s(MESH), PlanOptions())
    found = solve_baselines(planning, Search(), {})
    assert list(found) == ["data parallel", "ZeRO-1", "fully sharded data parallel"]
    nodes = {slot.name: slot.node for slot in planning.space.program.inputs}
    names = ("first.weight", "exp_avg:first.weight")
    specs = {
        recipe: [planning.strategy(nodes[name], solution.choice).outputs[0] for name in names]
        for recipe, solution in found.items()
        if solution is not None
    }
    (whole, *_), (kept, split), (both, also) = specs.values()
    assert specs["data parallel"] == [P(), P()]
    assert (whole, kept) == (P(), P())
    assert split.sharded_axes == both.sharded_axes == also.sharded_axes == ("data",)
    peaks = [np.max(planning.usage(solution.choice)) for solution in found.values() if solution is not None]
    assert peaks == sorted(peaks, reverse=True)
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions())
    assert plan.predicted.step_time_s <= min(step for step in plan.baselines.values() if step is not None)


def test_experts_are_shared_out_by_a_known_recipe() -> None:
    """Expert parallelism splits Mixtral's expert weights by experts, and the plan is no slower than a known recipe."""
    model, inputs = mixtral()
    program = trace(model, (), inputs)
    planning = planning_problem(program, MESH, h100s(MESH), PlanOptions())
    found = solve_baselines(planning, Search(), {})[EXPERT_PARALLEL]
    assert found is not None
    matrices = matrices_of_experts(planning)
    nodes = {slot.name: slot.node for slot in planning.space.program.inputs if slot.name in matrices}
    assert {planning.strategy(node, found.choice).outputs[0].dims[0] for node in nodes.values()} == {("data",)}
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions())
    assert plan.predicted.step_time_s <= min(step for step in plan.baselines.values() if step is not None)


def test_recipes_of_two_axes_split_parameters_over_the_inner_one() -> None:
    """HSDP and Megatron split parameters over the inner axis, and the plan is no slower than a known recipe.

    HSDP splits the batch over both axes, and Megatron over the outer axis.
    """
    mesh = Mesh({"data": 2, "model": 2})
    rows = torch.empty(8, 16, device="meta")
    program = trace(Perceptron(), (rows, rows))
    planning = planning_problem(program, mesh, h100s(mesh), PlanOptions())
    found = solve_baselines(planning, Search(), {})
    assert list(found) == ["data parallel", "fully sharded data parallel", HSDP, MEGATRON]
    axes = {}
    for name in (HSDP, MEGATRON):
        solution = found[name]
        assert solution is not None
        specs = {
            slot.name: planning.strategy(slot.node, solution.choice).outputs[0]
            for kind in (InputKind.PARAMETER, InputKind.INPUT)
            for slot in program.inputs_of(kind)
        }
        assert specs["first.weight"].sharded_axes == specs["second.weight"].sharded_axes == ("model",)
        axes[name] = {spec.axes_of(0) for slot, spec in specs.items() if "." not in slot}
    assert axes == {HSDP: {("data", "model")}, MEGATRON: {("data",)}}
    plan = plan_program(program, mesh, h100s(mesh), PlanOptions())
    assert plan.predicted.step_time_s <= min(step for step in plan.baselines.values() if step is not None)


def test_recipes_that_use_all_axes_alike_are_priced_on_one_mesh() -> None:
    """A recipe that uses all axes alike is priced on one mesh only, unless it does not fit there."""
    mesh, rows = Mesh({"data": 2, "model": 2}), torch.empty(8, 16, device="meta")
    program = trace(Perceptron(), (rows, rows))
    flat = plan_program(program, MESH, h100s(MESH), PlanOptions())
    assert list(flat.baselines) == ["data parallel", "fully sharded data parallel"]
    found = plan_program(program, mesh, h100s(mesh), PlanOptions(elsewhere=[flat]))
    assert list(found.baselines) == [HSDP, MEGATRON]
    tight = replace(flat, baselines={"data parallel": None, "fully sharded data parallel": 1.0})
    assert list(plan_program(program, mesh, h100s(mesh), PlanOptions(elsewhere=[tight])).baselines) == [
        "data parallel", HSDP, MEGATRON,
    ]  # fmt: skip


def test_recipes_take_the_step_that_they_have_on_the_best_mesh() -> None:
    """Over several meshes, a recipe has its shortest step time, or None if it fits on no mesh."""
    steps = ({"a": 2.0, "b": None, "c": None}, {"a": 3.0, "b": 1.0, "c": None})
    assert least_baselines(steps) == {"a": 2.0, "b": 1.0, "c": None}
    assert least_baselines(steps[:1]) is steps[0]


def test_a_program_without_state_has_no_zero_1() -> None:
    """A program without an optimizer update has no ZeRO-1 among its known recipes."""
    rows = torch.empty(8, 16, device="meta")
    planning = planning_problem(trace(Perceptron(), (rows, rows)), MESH, h100s(MESH), PlanOptions())
    assert list(solve_baselines(planning, Search(), {})) == ["data parallel", "fully sharded data parallel"]


def test_a_recipe_that_constraints_exclude_is_left_out() -> None:
    """A recipe that contradicts a constraint is left out, and not reported as too large."""
    rows = torch.empty(8, 16, device="meta")
    program = trace(Perceptron(), (rows, rows))
    constraints = {"first.weight": P("data")}
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions(constraints=constraints))
    assert list(plan.baselines) == ["fully sharded data parallel"]


def test_a_plan_before_costs_what_it_did() -> None:
    """An earlier plan keeps its cost on its mesh.

    On a larger mesh with the same axes, the new plan is no slower than it.
    """
    rows = torch.empty(8, 16, device="meta")
    program = trace(Perceptron(), (rows, rows))
    before = plan_program(program, MESH, h100s(MESH), PlanOptions())
    planning = planning_problem(program, MESH, h100s(MESH), PlanOptions())
    again = solve_baselines(planning, Search(), {}, before)[BEFORE]
    assert again is not None
    assert again.cost == pytest.approx(before.objective, rel=1e-9)
    larger = Mesh({"data": 8})
    found = plan_program(program, larger, h100s(larger), PlanOptions(before=before))
    there = found.baselines[BEFORE]
    assert there is not None
    assert found.predicted.step_time_s <= there


class _Residual(nn.Module):
    """A feed-forward block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum()


def test_a_recipe_that_hides_more_is_the_plan() -> None:
    """Data parallelism, which hides its reductions, becomes the plan although another choice has a lower cost."""
    model = nn.Sequential(_Residual(256), _Residual(256), _Loss())
    program = trace(model, (torch.empty(2048, 256, device="meta"),), update=adamw(model))
    mesh, cluster = Mesh({"x": 2}), Cluster("l4", 1, 2)
    plan = plan_program(program, mesh, cluster, PlanOptions())
    assert plan.predicted.step_time_s == plan.baselines["data parallel"]
    assert plan.lower_bound is not None
    assert plan.lower_bound < plan.objective
    alone = plan_program(program, mesh, cluster, PlanOptions(with_baselines=False))
    assert alone.objective < plan.objective
    assert plan.predicted.step_time_s < 0.95 * alone.predicted.step_time_s
