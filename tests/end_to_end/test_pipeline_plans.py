"""One plan covers all stages: it is planned, saved, loaded and run, and predicts the memory in flight."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import (
    Cluster,
    DoesNotFitError,
    Mesh,
    Plan,
    PlanMismatchError,
    Recipe,
    VerificationError,
)
from autoshard.ir.program import Program
from cost_models.hardware import node_type
from cost_models.topology import Link
from passes.driver.planner import Planner
from tests.benchmarks.pipeline_memory import TOLERANCE, measure
from tests.end_to_end.test_pipelines import MICRO_BATCHES, NORM, adamw, check_equal, compiled, skips
from tests.models import Blocks
from tests.runtime.processes import on_processes

MESH = {"pipeline": 2, "data": 2}


def wide() -> tuple[nn.Module, dict[str, Any]]:
    """Return a model whose activations are far larger than its weights, and a batch."""
    torch.manual_seed(0)
    return Blocks(16, 4), {"x": torch.randn(64, 32, 16), "target": torch.randn(64, 32, 16)}


def planned(mesh: dict[str, int] = MESH, recipe: Recipe | None = None) -> Plan:
    model, inputs = skips()
    settings = {"max_grad_norm": NORM, "time_budget_s": 5.0, "precision": None}
    (batch,) = {len(value) for value in inputs.values()}
    recipe = recipe or Recipe(micro_batch=batch // MICRO_BATCHES // mesh.get("data", 1))
    return autoshard.plan(model, Mesh(mesh), example_inputs=inputs, optimizer=adamw(model), recipe=recipe, **settings)


def test_a_saved_plan_runs(tmp_path: Path) -> None:
    """A saved pipeline plan loads equal, and sets the micro-batches and schedule of the step that runs it."""
    plan = planned(recipe=Recipe(schedule="GPipe", micro_batch=1))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert [stage.mesh for stage in plan.stages] == [Mesh({"data": 2})] * 2
    assert plan.order is not None
    assert (plan.order.micro_batches, plan.schedule, plan.mesh) == (MICRO_BATCHES, "GPipe", Mesh(MESH))
    assert {*plan.parameters} >= {"embed.weight", "layers.0.weight", "layers.3.bias"}
    for given in (plan, tmp_path / "plan.json"):
        step = check_equal("skips", Mesh(MESH), plan=given, micro_batches=None)
        assert step.plan == plan


def test_an_order_without_a_backward_is_refused() -> None:
    """A plan whose order lacks one backward raises before a step runs, in `compile` and in `prove`."""
    plan = planned()
    assert plan.order is not None
    *before, _ = plan.order.ranks[1]
    wrong = replace(plan, order=replace(plan.order, ranks=(plan.order.ranks[0], tuple(before))))
    with pytest.raises(VerificationError, match="is sent 0 times and received once"):
        check_equal("skips", Mesh(MESH), plan=wrong, micro_batches=None)
    model, inputs = skips()
    with pytest.raises(VerificationError):
        autoshard.prove(model, wrong, example_inputs=inputs, optimizer=adamw(model), max_grad_norm=NORM)


def test_stages_are_proven_again() -> None:
    """`verify` proves all stages of a training step, their order, and the stages of an evaluation."""
    step, _, inputs = compiled("skips", Mesh(MESH), recipe=Recipe(schedule="InterleavedZeroBubble", virtual_stages=2))
    step(**inputs)
    report = autoshard.verify(step)
    assert report.results["parameter_update"] == len(step.optimizer.state)
    assert report.results["squares"] == len(step.plan.stages)
    with torch.no_grad():
        step.sharded(**inputs)
    assert set(autoshard.verify(step.sharded).results) == {"output"}


def test_a_plan_is_printed(tmp_path: Path) -> None:
    """The text, page and timeline of a pipeline plan show its stages, and the text shows schedule and bubble."""
    plan = planned({"pipeline": 2})
    assert "Schedule 1F1B: 2 stages on 2 ranks, 4 micro-batches, bubble" in str(plan)
    assert "layers.2.weight to layers.3.bias" in str(plan) or "layers.3.bias" in str(plan)
    plan.report(tmp_path / "plan.html")
    assert "<h2>Stages</h2>" in (tmp_path / "plan.html").read_text()
    assert plan.predicted.timeline is not None
    assert plan.predicted.timeline.processes == ("pipeline rank 0", "pipeline rank 1")


def test_stages_of_one_node_hand_on_inside_it() -> None:
    """Four stages on two nodes are predicted faster than on four nodes, and slower than on one node."""
    model, inputs = skips()
    node = replace(node_type("h100_sxm"), inter=Link(1e6, 1.0, 0.0, 1e-3, 0.0, 0.0, 1.0))
    asked: dict[str, Any] = {"example_inputs": inputs, "optimizer": adamw(model), "recipe": Recipe(micro_batch=2)}
    inside, both, outside = (
        autoshard.plan(model, Cluster(node, nodes, 4 // nodes).mesh({"pipeline": 4}), precision=None, **asked)
        for nodes in (1, 2, 4)
    )
    times_s = [plan.predicted.step_time_s for plan in (inside, both, outside)]
    assert times_s[0] < 0.3 * times_s[1]
    assert times_s[1] < 0.8 * times_s[2]


def test_the_parts_of_a_step_sum_to_it() -> None:
    """The parts of a pipeline step, with bubble and transfers, sum to its time; parts of memory sum to the peak.

    Each operator of a source line is listed once.
    """
    plan = planned({"pipeline": 2})
    predicted = plan.predicted
    assert sum(predicted.breakdown.values()) == pytest.approx(predicted.step_time_s)
    assert sum(predicted.memory_breakdown.values()) == predicted.peak_memory_bytes
    assert predicted.breakdown["bubble"] > 0
    assert predicted.breakdown["communication over pipeline"] > 0
    assert len({(item.operator, item.source, item.is_split) for item in plan.operators}) == len(plan.operators)


def test_the_number_of_micro_batches_is_chosen() -> None:
    """Without a stated number, the plan has 2, 4 or 8 micro-batches of a batch of 8."""
    plan = planned({"pipeline": 2}, Recipe())
    assert plan.order is not None
    assert plan.order.micro_batches in (2, 4, 8)


def test_a_step_of_more_sequences_than_the_example() -> None:
    """A plan with `global_batch` twice the example's batch runs that batch with the loss of one device."""
    model, inputs = skips()
    many = {name: torch.cat([value, value]) for name, value in inputs.items()}
    asked = {"example_inputs": inputs, "optimizer": adamw(model), "max_grad_norm": NORM, "precision": None}
    plan = autoshard.plan(model, Mesh(MESH), global_batch=16, recipe=Recipe(micro_batch=2), time_budget_s=5.0, **asked)
    assert (plan.micro_batches, plan.inputs["input:0"]) == (4, "i64[4, 4]")
    step, _, _ = compiled("skips", Mesh(MESH), plan=plan, micro_batches=None)
    assert float(step(**many)) == pytest.approx(float(model(**many).detach()), rel=1e-5)
    free = autoshard.plan(model, Mesh({"data": 2}), global_batch=16, time_budget_s=5.0, **asked)
    assert (free.micro_batches, free.inputs["input:0"]) == (1, "i64[16, 4]")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_batches": 2}, "micro_batches=2 is asked for, and the plan has micro_batches=4"),
        ({"recipe": Recipe(schedule="GPipe")}, "schedule='GPipe' is asked for, and the plan has schedule='1F1B'"),
        (
            {"recipe": Recipe(virtual_stages=2)},
            "virtual_stages=2 is asked for, and the plan has virtual_stages=1. Leave virtual_stages out",
        ),
        ({"recipe": Recipe(zero=3)}, "zero=3 is asked for, and the plan has zero=None"),
        ({"recipe": Recipe(micro_batch=2)}, "micro_batch=2 is asked for, and the plan has micro_batch=1"),
        ({"mesh": {"data": 2}}, "no axis of"),
        ({"mesh": {"pipeline": 2}}, "Plan again for that mesh"),
        ({"max_grad_norm": None}, "of another model or optimizer"),
    ],
)
def test_a_plan_of_another_step_is_refused(options: dict[str, Any], words: str) -> None:
    """A plan that contradicts the arguments of `compile` raises an error that names the difference."""
    mesh = Mesh(options.pop("mesh", MESH))
    plan, (_, inputs) = planned(), skips()
    settings = {"micro_batches": None, "example_inputs": inputs, **options}
    with pytest.raises(PlanMismatchError, match=words):
        compiled("skips", mesh, plan=plan, **settings)


def in_wide_stages(**options: Any) -> Any:
    model, inputs = wide()
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"micro_batches": 8, "time_budget_s": 0.2, "example_inputs": inputs, **options}
    return autoshard.compile(model, Mesh({"pipeline": 2}), optimizer=optimizer, **settings), model, inputs


def test_memory_has_what_the_order_has_in_flight() -> None:
    """GPipe needs more than twice the memory of 1F1B; with less, a GPipe plan recomputes or offloads.

    GPipe holds all micro-batches in flight, and 1F1B as many as stages.
    """
    one, all_of_them = (in_wide_stages(recipe=Recipe(schedule=name))[0].plan for name in ("1F1B", "GPipe"))
    most, least = all_of_them.predicted.peak_memory_bytes, one.predicted.peak_memory_bytes
    assert most > 2 * least
    budget = (most + least) // 2
    tight = in_wide_stages(recipe=Recipe(schedule="GPipe"), memory_budget=budget)[0].plan
    assert tight.predicted.peak_memory_bytes <= budget
    restored = [node for stage in tight.stages for node in (*stage.recompute.nodes, *stage.offload.nodes)]
    assert restored
    assert sum(map(len, (*tight.recomputed.values(), *tight.offloaded.values()))) == len(restored)
    assert not {"recompute", "offload"}.isdisjoint(tight.predicted.breakdown)  # the names of plans without stages
    with pytest.raises(DoesNotFitError, match="micro-batches in flight on a rank"):
        in_wide_stages(recipe=Recipe(schedule="GPipe"), memory_budget=200_000)


def test_no_stage_is_searched_twice_within_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage is planned at most once for each memory limit, while limits fall until nothing fits."""
    search, asked = Planner.search_and_lower, []

    def noted(planner: Planner, program: Program, *others: Any) -> Any:
        asked.append((program.digest(), planner.memory_budget))
        return search(planner, program, *others)

    monkeypatch.setattr(Planner, "search_and_lower", noted)
    with pytest.raises(DoesNotFitError):
        in_wide_stages(recipe=Recipe(virtual_stages=2), memory_budget=200_000)
    assert len(asked) > len({digest for digest, _ in asked})
    assert len(asked) == len(set(asked))


def _takes_what_is_predicted(**options: Any) -> None:
    """Check that the measured memory of each rank is within the tolerance of the plan's."""
    found = measure(*in_wide_stages(**options))
    assert found.worst_error < TOLERANCE, (options, found)


CHECKS = {
    "1F1B": partial(_takes_what_is_predicted, recipe=Recipe(schedule="1F1B")),
    "GPipe": partial(_takes_what_is_predicted, recipe=Recipe(schedule="GPipe")),
    "interleaved": partial(_takes_what_is_predicted, recipe=Recipe(virtual_stages=2)),
    "zero bubble": partial(_takes_what_is_predicted, recipe=Recipe(schedule="InterleavedZeroBubble")),
}

test_measured_memory = on_processes(CHECKS, ranks=2, slow=["interleaved", "zero bubble"])


@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"data": 2}], ids=["stages", "no stages"])
def test_a_plan_of_micro_batches_is_proven(mesh: dict[str, int], tmp_path: Path) -> None:
    """`prove` proves a plan from a whole batch or from one micro-batch, and refuses another model."""
    model, inputs = skips()
    plan = autoshard.plan(
        model, Mesh(mesh), example_inputs=inputs, optimizer=adamw(model), max_grad_norm=NORM, precision=None,
        recipe=Recipe(micro_batch=8 // MICRO_BATCHES // mesh.get("data", 1)),
    )  # fmt: skip
    assert plan.micro_batches == MICRO_BATCHES
    part = {name: value[: 8 // MICRO_BATCHES] for name, value in inputs.items()}
    asked: dict[str, Any] = {"optimizer": adamw(model), "max_grad_norm": NORM}
    reports = [autoshard.prove(model, plan, example_inputs=each, **asked) for each in (inputs, part)]
    assert reports[0].values == reports[1].values > 0
    assert len(plan.stages) == (2 if "pipeline" in mesh else 0)
    assert reports[0].mesh == plan.mesh
    other = Blocks(16, 4)
    with pytest.raises(PlanMismatchError):
        autoshard.prove(other, plan, example_inputs=wide()[1], optimizer=adamw(other), max_grad_norm=NORM)
