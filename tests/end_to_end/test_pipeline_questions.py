"""A plan with stages answers the questions that every plan answers, for the stages that run."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autoshard
from autoshard import Cluster, Mesh, NotAvailableError, P, Plan, Recipe
from autoshard.errors import InvalidSpecError
from autoshard.runtime.stages.stage_meshes import is_elsewhere
from tests.end_to_end.test_pipeline_plans import wide
from tests.end_to_end.test_pipelines import MICRO_BATCHES, NORM, adamw, skips
from tests.runtime.processes import run_checks

SQUARE, STAGES = Mesh({"pipeline": 2, "data": 2}), Mesh({"pipeline": 2})
NAMES = ("embed.weight", "layers.3.bias", "layers.0.weight", "input:0")


def planned(mesh: Mesh = SQUARE, **options: Any) -> Plan:
    """Plan a model with skip connections in micro-batches."""
    model, inputs = skips()
    recipe = Recipe(micro_batch=len(inputs["tokens"]) // MICRO_BATCHES // dict(mesh.axes).get("data", 1))
    settings = {"recipe": recipe, "max_grad_norm": NORM, "time_budget_s": 60.0, "precision": None}
    return autoshard.plan(model, mesh, example_inputs=inputs, optimizer=adamw(model), **{**settings, **options})


@cache
def square() -> Plan:
    return planned()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_each_other_spec_takes_the_step_of_a_plan_with_it(name: str) -> None:
    """The step time that `explain` gives for another spec is that of a new plan with this spec as constraint."""
    found = square().explain(name)
    json.dumps(found.to_json())
    assert found.chosen.step_time_s == square().predicted.step_time_s
    assert found.others
    for item in found.others:
        again = planned(constraints={name: item.spec})
        assert item.step_time_s == pytest.approx(again.predicted.step_time_s, rel=1e-2)
        assert square().compare(again).step_time_s == (square().predicted.step_time_s, again.predicted.step_time_s)


@pytest.mark.sample(4)
@pytest.mark.parametrize("feature", ["data", "zero-1", "zero-2", "fsdp", "tensor", "pipeline", "recompute", "hsdp"])
def test_each_feature_has_an_answer(feature: str) -> None:
    """`why_not` answers for each feature that it is used, its variants with their times, or the reason against it."""
    answer = square().why_not(feature)
    assert answer.used or answer.variants or answer.missing in str(answer)
    assert all(item.fits == (item.step_time_s is not None) for item in answer.variants)
    if feature == "pipeline":
        assert answer.used == "of 2 stages"
    if feature == "fsdp":
        assert [item.name for item in answer.variants] == ["fsdp over data"]


@pytest.mark.slow
def test_limits_are_planned_again() -> None:
    """`limits` predicts no slower step for more memory or faster hardware."""
    plan = square()
    found = plan.limits()
    steps = {item.name: item.step_time_s for item in found.variants}
    assert {"10 % more memory", "memory without limit", "10 % faster matrix products"} <= steps.keys()
    assert all(step is not None and step <= 1.001 * plan.predicted.step_time_s for step in steps.values())
    assert found.memory_worth_s_per_byte == pytest.approx(0.0, abs=1e-9)


def test_formulas_are_sums_over_stages() -> None:
    """Formulas of FLOPs and parameters equal those without stages, and each of two stages has half the bytes."""
    model, inputs = wide()
    recipe = Recipe(micro_batch=len(inputs["x"]) // 4)
    piped, flat = (
        autoshard.plan(model, mesh, example_inputs=inputs, optimizer="adamw", precision=None, recipe=recipe)
        for mesh in (STAGES, Mesh({"data": 1}))
    )
    for name in ("step_flops", "parameters"):
        assert sympy.simplify(piped.formula(name) - flat.formula(name)) == 0, name
    assert sympy.simplify(2 * piped.formula("parameter_bytes") - flat.formula("parameter_bytes")) == 0
    sent = piped.formula("communication_bytes_pipeline")
    assert sent == 16 * 4 * sympy.Symbol("batch") * sympy.Symbol("sequence"), "an activation, or its gradient"


class _AddsLast(nn.Module):
    """Layers that add a parameter last. The parameter's gradient is that of the layer's result."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(3))
        self.added = nn.ParameterList(torch.randn(1, 8, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, added in zip(self.weights, self.added, strict=True):
            x = x.relu() @ weight + added
        return x.square().sum()


def test_gradients_that_a_stage_gets_from_the_next_count() -> None:
    """A gradient that a later stage has computed counts in `gradient_bytes`, as in the memory of the rank."""
    given = {"optimizer": "adamw", "precision": None, "recipe": Recipe(micro_batch=1)}
    plan = autoshard.plan(_AddsLast(), Mesh({"pipeline": 3}), example_inputs=(torch.randn(3, 8, 4),), **given)
    sizes = ("batch", "sequence")
    found, parameters = (plan.formula(name, fixed=sizes) for name in ("gradient_bytes", "parameter_bytes"))
    assert found == parameters == plan.predicted.memory_breakdown["gradients"]


def test_either_a_gap_is_shown_or_none() -> None:
    """A plan with stages has neither a lower bound nor a gap, and its text shows no gap."""
    assert (square().lower_bound, square().gap) == (None, None)
    assert "gap" not in str(square())


def test_mistakes_are_named() -> None:
    """`explain` of an unknown name lists the known names, and a loaded plan cannot explain without a model."""
    with pytest.raises(InvalidSpecError, match=r"explain\('nothing'\).*there are .*embed.weight") as raised:
        square().explain("nothing")
    assert "<" not in str(raised.value)
    with pytest.raises(NotAvailableError, match="has no model at hand"):
        Plan.from_json(square().to_json()).explain("embed.weight")


def test_the_mesh_that_an_outer_search_found_is_kept() -> None:
    """For a plan with `global_batch` on a cluster, `explain` and `formula` are about the plan that runs."""
    model, inputs = skips()
    plan = autoshard.plan(
        model, Cluster("h100_sxm", 1, 4), example_inputs=inputs, optimizer="adamw", precision=None, global_batch=8,
        constraints={"pipeline": 2},
    )  # fmt: skip
    assert plan.stages
    name = next(iter(plan.parameters))
    found = plan.explain(name)
    assert found.chosen.spec == plan.parameters[name].spec
    assert found.chosen.step_time_s == plan.predicted.step_time_s
    assert plan.formula("parameters").subs({"layers": 4}) > 0


def check_places() -> None:
    """`explain` gives each weight of this rank's stages the spec of its DTensor."""
    model, inputs = skips()
    constraints = {"*weight": P("data")}
    plan = planned(constraints=constraints)
    step = autoshard.compile(
        model, SQUARE, optimizer=torch.optim.AdamW(model.parameters()), example_inputs=inputs, plan=plan,
        micro_batches=MICRO_BATCHES, max_grad_norm=NORM,
    )  # fmt: skip
    names = []
    for name, parameter in step.sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        if is_elsewhere(parameter) or name not in plan.parameters:  # no stage reads it
            continue
        spec = plan.explain(name).chosen.spec
        expected = Shard(spec.dim_of("data")) if spec.dim_of("data") is not None else Replicate()
        assert parameter.placements[parameter.device_mesh.mesh_dim_names.index("data")] == expected, name
        names.append(name)
    assert names


@pytest.mark.slow
def test_what_explain_says_is_where_the_runtimes_dtensor_lies() -> None:
    """On four processes, the specs that `explain` gives are those of the DTensors of each rank's stages."""
    assert run_checks({"places": check_places}) == {"places": ""}
