"""The step of a compiled program, predicted operator by operator, equals the prediction of its plan."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Cluster, Mesh, P
from autoshard.ir.plan import Plan
from autoshard.ir.profile import ELSE, PredictedSteps
from autoshard.ir.range_names import OVER, part_of
from passes.prediction.predict_steps import predict_steps

GPUS = Cluster("h100_sxm", 1, 4)


def predicted(mesh: Mesh, cluster: Cluster | None = None, **options: Any) -> tuple[PredictedSteps, Plan]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    step = autoshard.compile(
        model,
        mesh,
        optimizer=torch.optim.AdamW(model.parameters()),
        loss_fn=lambda outputs: outputs.square().mean(),
        example_inputs=(torch.zeros(64, 64),),
        cluster=cluster,
        **options,
    )
    program, plan = step.sharded.program, step.plan  # type: ignore[union-attr]
    assert program is not None
    assert plan is not None
    return predict_steps(program, cluster or Cluster("cpu_laptop", 1, mesh.size)), plan


@pytest.mark.parametrize(
    ("axes", "cluster", "options"),
    [
        ({"data": 2}, None, {}),
        ({"data": 2, "model": 2}, GPUS, {"max_grad_norm": 1.0}),
        ({"data": 4}, GPUS, {"micro_batches": 2}),
        ({"pipeline": 2, "data": 2}, GPUS, {"micro_batches": 4, "max_grad_norm": 1.0}),
        ({"pipeline": 2}, None, {"micro_batches": 2, "recipe": autoshard.Recipe(schedule="InterleavedZeroBubble")}),
    ],
)
def test_the_step_is_that_of_the_plan(axes: dict[str, int], cluster: Cluster | None, options: dict[str, Any]) -> None:
    """Each rank of a pipeline has the step time of the plan, with spans of all modules inside the step."""
    found, plan = predicted(Mesh(axes), cluster, **options)
    for step in found.steps:
        assert step.duration_ns / 1e9 == pytest.approx(plan.predicted.step_time_s, rel=1e-3)
        assert sum(step.parts.values()) == pytest.approx(step.duration_ns / 1e9)
        assert all(0 <= span.start_ns <= span.end_ns <= step.duration_ns + 1 for span in step.spans)
    assert len(found.steps) == axes.get("pipeline", 1)
    modules = {span.name.split()[1] for step in found.steps for span in step.spans if span.name.startswith("forward: ")}
    assert {"0", "1", "2", "3"} <= modules


def test_costs_are_those_of_the_spans() -> None:
    """Without overlap, the costs of forward, backward, update and communication equal the times of these parts."""
    found, plan = predicted(Mesh({"data": 2}), micro_batches=2, constraints={"input:0": P("data"), "*.weight": P()})
    costs = defaultdict[str, float](float)
    for cost in found.costs[0]:
        costs[part_of(cost.name)] += cost.seconds
    parts = found.steps[0].parts
    adding_s = plan.predicted.breakdown["accumulation compute"]
    assert costs["forward"] == pytest.approx(parts["forward"], rel=1e-3)
    assert costs["backward"] == pytest.approx(parts["backward"] - adding_s, rel=1e-3)
    assert costs["update"] == pytest.approx(parts["update"], rel=1e-3)
    assert costs[f"{OVER}data"] == pytest.approx(parts[f"{OVER}data"], rel=1e-2)  # and copies of a bucket
    assert parts[ELSE] == pytest.approx(0, abs=1e-6)
    assert {cost.constant for cost in found.costs[0]} == {"matmul.f32", "memory", "link.intra"}


def test_a_plan_of_one_micro_batch_is_predicted_with_all_micro_batches() -> None:
    """A step of four micro-batches with a plan for one is predicted with four forwards."""
    found, plan = list[float](), None
    for parts in (1, 4):
        step = autoshard.compile(
            model := nn.Linear(64, 64),
            Mesh({"data": 4}),
            optimizer=torch.optim.SGD(model.parameters()),
            loss_fn=lambda outputs: outputs.square().mean(),
            example_inputs=(torch.zeros(parts * 64, 64),),
            cluster=GPUS,
            micro_batches=parts,
            plan=plan,
        )
        plan, program = step.plan, step.sharded.program
        assert program is not None
        assert step._predict is not None
        found.append(step._predict(program).steps[0].parts["forward"])
    assert found[1] == pytest.approx(4 * found[0], rel=1e-3)
