"""`plan.why_not` and `plan.limits` state the step times and memory of new plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Cluster, Mesh, P, Recipe
from autoshard.errors import InvalidSpecError, NotAvailableError
from autoshard.ir.cluster_mesh import ClusterMesh
from autoshard.ir.plan import Plan
from cost_models.hardware import Cluster as PricedCluster
from passes.planning.restrictions import ROLES
from passes.questions.ask import Questions
from passes.questions.change import Change
from passes.questions.roles import has_role
from tests.end_to_end.questioned import replan_of
from tests.passes.questions.test_ask import Model

CLUSTER, MESH = Cluster("h100_sxm", nodes=2, devices_per_node=2), Mesh({"data": 2, "model": 2})
TIGHT = 408_000_000
"""Memory below the need of a model of one block, in bytes."""
SHORT, ENOUGH = 452_000_000, 624_000_000
"""Memory in bytes that forces values of two blocks to the host, and memory that keeps them on the device."""


def make_plan(cluster: PricedCluster = CLUSTER, blocks: int = 2, **arguments: object) -> Plan:
    tokens = torch.randint(0, 50, (4096, 8))
    asked = {"optimizer": "adamw", "precision": None, **arguments}
    return autoshard.plan(Model(1024, blocks), ClusterMesh(cluster, MESH), example_inputs=(tokens,), **asked)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def free() -> Plan:
    """A plan without a memory limit."""
    return make_plan()


@pytest.fixture(scope="module")
def tight() -> Plan:
    """Return the plan of one block in little memory, whose questions need no time limit."""
    plan = make_plan(blocks=1, memory_budget=TIGHT)
    assert plan.recompute.nodes
    return plan


@pytest.mark.sample(3)
@pytest.mark.parametrize("feature", ROLES)
def test_the_figures_are_those_of_plans_that_do_it(free: Plan, feature: str) -> None:
    """Each alternative of `why_not` has the step time of a plan in which the axis is restricted to the role.

    The axis has the role in this plan.
    """
    again = replan_of(free)
    (planning,) = again.problems()
    answer = free.why_not(feature)
    stated = {item.name: item for item in answer.variants}
    assert {f"over {name.rpartition(' ')[2]}" for name in stated} | set(answer.used.split(", ")) >= {"over model"}
    for name, item in stated.items():
        axis = name.rpartition(" ")[2]
        found = again(free, Change(roles={axis: ROLES[feature]}))
        assert item.step_time_s == found.predicted.step_time_s
        assert has_role(
            [(planning, lambda node, plan=found: (plan.nodes[node].inputs, plan.nodes[node].outputs))], axis, feature
        )
        assert found.predicted.step_time_s >= 0.98 * free.predicted.step_time_s


def test_hsdp_takes_two_axes(free: Plan) -> None:
    """The HSDP alternative has the step time of a plan with parameters split over one axis and copied over another."""
    item = next(item for item in free.why_not("hsdp").variants if item.name == "hsdp over data, copied over model")
    found = replan_of(free)(free, Change(roles={"data": ROLES["fsdp"], "model": ROLES["data"]}))
    assert item.step_time_s == found.predicted.step_time_s


@pytest.mark.slow
def test_a_plan_that_offloads_is_asked_what_that_saves() -> None:
    """If no plan fits without offload, `why_not` states the least memory, which is above the limit."""
    plan = make_plan(memory_budget=SHORT)
    assert plan.offload.nodes
    answer = plan.why_not("cpu offload")
    (item,) = answer.variants
    assert (item.name, item.fits) == ("without offload", False)
    assert item.smallest_bytes is not None
    assert SHORT < item.smallest_bytes < ENOUGH
    assert f"does use offload, of {len(plan.offload.nodes)} values" in str(answer)


@pytest.mark.slow
def test_memory_is_named_where_it_is_what_keeps_a_feature_out(tight: Plan) -> None:
    """If copies of all parameters do not fit, `why_not` states the least memory.

    FSDP on both axes leaves no other axis to try.
    """
    again = replan_of(tight)
    planner = replace(again.planned.planner, memory_budget=TIGHT // 2)
    here = Questions(replace(again, planned=replace(again.planned, planner=planner)))
    answer = here.why_not(tight, "data")
    assert answer.variants
    for item in answer.variants:
        assert not item.fits
        assert item.smallest_bytes is not None
        assert item.smallest_bytes > TIGHT // 2
    assert "no plan with it fits in memory" in str(answer)
    answer = tight.why_not("fsdp")
    assert not answer.variants
    text = "The plan does use fsdp, over data, over model; no other plan: no other axis of the mesh can be used so."
    assert text in str(answer)


@pytest.mark.slow
def test_limits_are_those_of_planning_with_more(tight: Plan) -> None:
    """`limits` states the step times of new plans with more memory and with a faster network, within 2 %."""
    found = tight.limits()
    stated = {item.name: item for item in found.variants}
    more = make_plan(blocks=1, memory_budget=int(1.1 * TIGHT))
    assert stated["10 % more memory"].step_time_s == pytest.approx(more.predicted.step_time_s, rel=2e-2)
    inter = CLUSTER.node.inter
    assert inter is not None
    faster = PricedCluster(replace(CLUSTER.node, inter=inter.scaled(1.1)), nodes=2, devices_per_node=2)
    again = make_plan(faster, blocks=1, memory_budget=TIGHT)
    assert stated["10 % faster network"].step_time_s == pytest.approx(again.predicted.step_time_s, rel=2e-2)
    assert found.binding in stated
    assert found.binding in str(found)


@pytest.mark.parametrize(
    ("nodes", "devices", "links"),
    [(1, 4, {"10 % faster links in a node"}), (4, 1, {"10 % faster network"}), (2, 2, None)],
)
def test_limits_ask_for_what_the_cluster_has(nodes: int, devices: int, links: set[str] | None) -> None:
    """`limits` asks for a faster network only if there are several nodes, and for faster links only inside nodes."""
    cluster = Cluster("h100_sxm", nodes=nodes, devices_per_node=devices)
    plan = autoshard.plan(
        nn.Linear(64, 64), cluster.mesh({"data": 4}), example_inputs=(torch.ones(8, 64),), optimizer=None
    )
    found = {item.name for item in plan.limits().variants if "links" in item.name or "network" in item.name}
    assert found == (links or {"10 % faster links in a node", "10 % faster network"})


@pytest.mark.slow
def test_without_a_limit_memory_is_no_question(free: Plan) -> None:
    """Without a memory limit, 10 % more memory does not shorten the step."""
    steps = {item.name: item.step_time_s for item in free.limits().variants}
    assert steps["10 % more memory"] == pytest.approx(free.predicted.step_time_s, rel=2e-3)


def test_what_cannot_be_asked_is_said(free: Plan) -> None:
    """`why_not` refuses unknown features, and a plan without its model refuses all questions.

    A pipeline is refused for a plan without an optimizer or with constraints.
    """
    with pytest.raises(InvalidSpecError, match=r"data \(ddp, .*zero-1, zero-2, fsdp \(zero-3, .*pipeline \(pp"):
        free.why_not("magic")
    forward = make_plan(optimizer=None)
    constrained = make_plan(constraints={"*.weight": P()})
    for plan, words in (
        (forward, "whole training steps: plan with optimizer='adamw'"),
        (constrained, "without con"),
    ):
        with pytest.raises(NotAvailableError, match=f"pipeline.*{words}"):
            plan.why_not("pipeline")
    alone = replace(free, alternatives=None)
    for ask in (lambda: alone.why_not("tensor"), alone.limits):
        with pytest.raises(NotAvailableError, match="has no model at hand"):
            ask()


def test_a_recipe_that_recomputes_is_asked_for_a_plan_that_does_not() -> None:
    """For a recipe that recomputes fully, `why_not` gives a faster plan without recomputation."""
    mesh, tokens = Cluster("h100_sxm", 1, 2).mesh({"data": 2}), torch.zeros(4, 8, dtype=torch.int64)
    recipe = Recipe(data=2, zero=0, recompute="full")
    plan = autoshard.plan(Model(8), mesh, example_inputs=(tokens,), optimizer="sgd", recipe=recipe)
    (item,) = plan.why_not("recompute").variants
    assert item.step_time_s is not None
    assert item.step_time_s < plan.predicted.step_time_s


def test_recomputation_and_offload_are_asked_of_plans_that_no_recipe_makes() -> None:
    """For a plan with constraints and without an optimizer, `why_not` gives slower plans that recompute or offload."""
    mesh, tokens = Cluster("h100_sxm", 1, 2).mesh({"data": 2}), torch.zeros(4, 8, dtype=torch.int64)
    plan = autoshard.plan(
        Model(8), mesh, example_inputs=(tokens,), optimizer=None, constraints={"blocks.*.weight": P()}
    )
    for feature in ("recompute", "offload"):
        (item,) = plan.why_not(feature).variants
        assert item.step_time_s is not None
        assert item.step_time_s > plan.predicted.step_time_s


def test_a_model_without_blocks_has_none_to_recompute() -> None:
    """For a model without blocks or without a backward, `why_not` says that nothing can be recomputed, and why."""
    mesh = Cluster("h100_sxm", 1, 2).mesh({"data": 2})
    for trains, words in ((True, "no list of blocks"), (False, "no backward")):
        model = nn.Linear(8, 8).requires_grad_(trains)
        plan = autoshard.plan(model, mesh, example_inputs=(torch.ones(4, 8),), optimizer=None)
        assert words in plan.why_not("recompute").missing


def test_what_no_value_can_do_has_no_variants() -> None:
    """Without optimizer state, `why_not` has no plan with ZeRO-1, and says that no axis can have this role."""
    plan = autoshard.plan(Model(64), CLUSTER.mesh(MESH), example_inputs=(torch.zeros(4, 8, dtype=torch.int64),))
    answer = plan.why_not("zero-1")
    assert answer.variants == ()
    assert "no axis of the mesh" in str(answer)


def test_a_role_that_the_recipe_excludes_is_no_answer() -> None:
    """With ZeRO-1 in the recipe, `why_not` has no plan with plain data parallelism, and says why."""
    mesh, tokens = Cluster("h100_sxm", 1, 2).mesh({"data": 2}), torch.zeros(4, 8, dtype=torch.int64)
    recipe = Recipe(data=2, zero=1)
    plan = autoshard.plan(Model(8), mesh, example_inputs=(tokens,), optimizer="adamw", recipe=recipe)
    assert plan.why_not("zero-1").used == "over data"
    answer = plan.why_not("data")
    assert not answer.variants
    assert answer.missing == "no axis of the mesh can be used so"


def test_memory_without_limit_keeps_gathered_parameters_over_micro_batches() -> None:
    """Without a memory limit, a step of four micro-batches under ZeRO-3 is not longer than the plan's step."""
    mesh, tokens = Cluster("h100_sxm", 1, 2).mesh({"data": 2}), torch.zeros(16, 8, dtype=torch.int64)
    recipe = Recipe(data=2, zero=3, micro_batch=2)
    plan = autoshard.plan(Model(64), mesh, example_inputs=(tokens,), optimizer="adamw", recipe=recipe, global_batch=16)
    assert plan.micro_batches == 4
    (free,) = (item for item in plan.limits().variants if item.name == "memory without limit")
    assert free.step_time_s is not None
    assert free.step_time_s <= plan.predicted.step_time_s * 1.001
