"""A plan as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.ir.kernels import Kernels, KernelUse
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import NodePlan, ParameterPlan, Prediction
from autoshard.ir.recipe import Recipe
from autoshard.ir.spec import PartitionSpec
from autoshard.report.printer import in_words, render_plan, running_lines


def plan_with(predicted: Prediction) -> Plan:
    """An empty plan with this prediction."""
    return Plan(
        mesh=Mesh({"x": 2}), program_digest="", inputs={}, nodes={}, outputs={}, parameters={}, predicted=predicted,
        objective=1.0, lower_bound=None, search_time_s=0.0, hardware="h100_sxm:1x2",
    )  # fmt: skip


TODAY = Prediction(2e-3, 2**30, {"forward compute": 2e-3}, {"parameters": 2**30}, mfu=0.5, hfu=0.6)


def test_what_is_not_known_is_not_printed() -> None:
    """An unknown interval, overlap or number of tokens is not printed."""
    text = render_plan(plan_with(TODAY))
    rows = " ".join(text.split())
    assert "step │ 2 ms" in rows
    assert "peak memory per device │ 1.00 GiB, no limit" in rows
    assert "forecast" not in text
    assert "hidden" not in text
    assert "tokens" not in text


def test_the_figures_asked_for_first_come_first() -> None:
    """The text begins with step, throughput, utilisation and memory, then has the roles of axes, and then further
    figures."""
    predicted = replace(TODAY, tokens_per_s=4096.0)
    nodes = {"input_0": NodePlan((), (PartitionSpec("x"),))}
    parameters = {"w": ParameterPlan(PartitionSpec(), (8,), 0)}
    plan = replace(plan_with(predicted), memory_budget=2**31, nodes=nodes, parameters=parameters, baselines={"a": 4e-3})
    text = " ".join(render_plan(plan).split())
    told = (
        "priced for h100_sxm:1x2", "step │ 2 ms", "tokens/s │ 4,096", "model FLOPs utilisation │ 50.0%",
        "peak memory per device │ 1.00 GiB, of 2.00 GiB", "Axis x splits inputs and copies all parameters.",
        "compile(model", "Known recipes", "Parameters", "Cost of one step",
    )  # fmt: skip
    places = [text.index(each) for each in told]
    assert places == sorted(places)


def test_a_sentence_says_what_each_axis_does() -> None:
    """A sentence gives each axis's role, from the names of layouts with an update, and from specs without one."""
    split, whole = PartitionSpec("x"), PartitionSpec()
    without = {
        "a": ParameterPlan(split, (75, 1), 0),
        "b": ParameterPlan(whole, (24,), 0),
        "c": ParameterPlan(whole, (1,), 0),
    }
    mesh, nodes = Mesh({"x": 2, "y": 2}), {"input_0": NodePlan((), (split,))}
    plan = replace(plan_with(TODAY), mesh=mesh, parameters=without, nodes=nodes)
    assert in_words(plan) == [
        "Axis x splits inputs, splits 75% of parameters and copies 25% of parameters; axis y copies all parameters."
    ]
    words = {"a": "ZeRO-3 over x; copied over y", "b": "ZeRO-1 over x; split over y", "c": "copied over x, y"}
    laid_out = {name: replace(item, layout=words[name]) for name, item in without.items()}
    assert in_words(replace(plan, parameters=laid_out)) == [
        "Axis x splits inputs, shards 75% of parameters (ZeRO-3) and shards the optimizer state of 24% of parameters "
        "(ZeRO-1); axis y copies 76% of parameters and splits 24% of parameters."
    ]
    both = replace(plan, parameters={"d": replace(without["a"], layout="ZeRO-2 over x, y")})
    assert in_words(replace(both, mesh=Mesh({"x": 2, "y": 2, "z": 1}))) == [
        "Axis x splits inputs and shards gradients and optimizer state of all parameters (ZeRO-2); axis y shards "
        "gradients and optimizer state of all parameters (ZeRO-2)."
    ]
    staged = replace(plan, mesh=Mesh({"pipeline": 2, "x": 2, "y": 2}), nodes={}, stages=(plan, plan))
    assert in_words(staged)[0].startswith("Axis pipeline carries 2 stages; axis x splits inputs, splits 75%")
    assert not in_words(replace(plan, nodes={}))


def test_parameters_without_elements_have_no_share() -> None:
    """A plan whose only parameter has no elements is printed, without shares of layouts."""
    empty = ParameterPlan(PartitionSpec(), (0, 3), 0, layout="copied over x")
    rows = " ".join(render_plan(replace(plan_with(TODAY), parameters={"dummy": empty})).split())
    assert "dummy │ 1 │ 0x3 │ P() │ 0 B" in rows
    assert "layout:" not in rows


def test_batch_and_whether_it_runs_are_told() -> None:
    """The text has the plan's inputs and micro-batches and the call of `compile` that runs it, or the sequences of
    a priced recipe."""
    plan = replace(plan_with(TODAY), inputs={"input:0": "i64[4, 8]"})
    assert running_lines(plan) == ["Inputs: input:0 i64[4, 8].", "compile(model, Mesh(x=2), plan=plan) runs it."]
    trains = replace(
        plan,
        micro_batches=2,
        inputs={f"input:{index}": "f32[2]" for index in range(8)},
        outputs={"parameter_update w": PartitionSpec()},
    )
    inputs = ", ".join(f"input:{index} f32[2]" for index in range(6))
    assert running_lines(trains) == [
        f"Inputs of each of 2 micro-batches: {inputs} and 2 others.",
        "compile(model, Mesh(x=2), optimizer=..., plan=plan) runs it, in 2 micro-batches.",
    ]
    priced = replace(plan, recipe=Recipe(data=2, micro_batch=8), runtime="megatron")
    assert running_lines(priced) == [
        f"Recipe: {Recipe(data=2, micro_batch=8).words}.",
        "Batch: 16 sequences.",
        "The price of a run under runtime='megatron'. For compile, plan with recipe=plan.recipe.",
    ]
    free = replace(plan, recipe=Recipe(data=None))
    assert running_lines(free)[1:] == [
        "Inputs: input:0 i64[4, 8].",
        "compile(model, Mesh(x=2), optimizer=..., plan=plan) runs it.",
    ]
    assert " ".join(running_lines(priced)) in " ".join(render_plan(priced).split())


def test_a_predicted_plan_says_so() -> None:
    """The text of a predicted plan has its interval, its hidden time, and both utilisations."""
    predicted = replace(
        TODAY, overlaps=True, overlapped={"x": 1e-3}, step_time_interval_s=(1.8e-3, 2.2e-3), interval_coverage=0.9
    )
    text = render_plan(plan_with(predicted))
    assert "step │ 2 ms (90%: 1.8 ms to 2.2 ms) │" in " ".join(text.split())
    assert "A prediction for another runtime, which overlaps communication with computation." in text
    for row in ("hidden: communication over x │ 1 ms", "model FLOPs utilisation", "50.0%", "60.0%"):
        assert row in " ".join(text.split())


def test_communication_has_an_exposed_and_a_hidden_part() -> None:
    """Communication over an axis has an exposed part within the step, printed first, and a hidden part."""
    parts = {"forward compute": 1.5e-3, "communication over x": 5e-4}
    predicted = replace(TODAY, breakdown=parts, overlapped={"x": 1e-3, "y": 2e-3})
    assert predicted.communication == {"x": (5e-4, 1e-3), "y": (0.0, 2e-3)}
    assert predicted.communication["x"].hidden_s == 1e-3
    assert sum(predicted.breakdown.values()) == predicted.step_time_s
    rows = " ".join(render_plan(plan_with(predicted)).split())
    places = [rows.index(f"{name} over {axis} │") for name, axis in (
        ("communication", "x"), ("hidden: communication", "x"), ("hidden: communication", "y")
    )]  # fmt: skip
    assert places == sorted(places)
    assert not TODAY.communication


def test_known_recipes_stand_beside_the_predicted_step() -> None:
    """Known recipes are printed with their step times relative to the plan's, without the search's
    objective and bound."""
    known = {"data parallel": 2.5e-3, "ZeRO-1": None}
    nodes = {"input_0": NodePlan((), (PartitionSpec(),))}
    plan = replace(plan_with(TODAY), objective=1e-3, lower_bound=5e-4, baselines=known, nodes=nodes)
    text = " ".join(render_plan(plan).split())
    for row in ("data parallel │ 2.5 ms │ 1.25 x", "ZeRO-1 │ does not fit │"):
        assert row in text
    assert "1 ms" not in text
    assert "50.00%" not in text
    assert "Known recipes" not in render_plan(plan_with(TODAY))


def test_the_price_of_a_recipe_shows_its_gap() -> None:
    """A priced recipe prints how far it may be from the fastest recipe."""
    priced = replace(plan_with(TODAY), objective=2e-3, lower_bound=1.5e-3, recipe=Recipe(data=2, micro_batch=8))
    nodes = {"input_0": NodePlan((), (PartitionSpec("x"),))}
    for each in (priced, replace(priced, nodes=nodes)):
        assert "at most 25.00% from the fastest recipe" in render_plan(replace(each, runtime="megatron"))


def test_the_price_of_a_recipe_says_nothing_of_axes() -> None:
    """The text of a priced recipe does not describe axes by specs."""
    parameters, nodes = {"w": ParameterPlan(PartitionSpec(), (8,), 0)}, {"mm": NodePlan((), (PartitionSpec("x"),))}
    priced = replace(plan_with(TODAY), mesh=Mesh({"pipeline": 2, "x": 2}), parameters=parameters, nodes=nodes)
    assert in_words(replace(priced, runtime="megatron")) == []


def test_kernels_alike_share_a_row() -> None:
    """Equal kernels share a row with their number, and with the first calls that they replace."""
    one = KernelUse("triton_gated", "forward", "mul", {"silu": 1.0, "mul": 1.0}, (), (), 1e-3, 1, 100, 2, 1024)
    many = replace(one, name="triton_five", stands_for=dict.fromkeys("abcd", 1.0), copies=(("e", "a", 1.0),), times=3)
    kernels = Kernels((one, replace(one, times=3), many), breakdown_without={"forward compute": 3e-3})
    text = " ".join(render_plan(plan_with(replace(TODAY, kernels=kernels))).split())
    assert "triton_gated │ forward │ 4 │ 8 │ 4.00 KiB │ silu, mul │" in text
    assert "triton_five │ forward │ 3 │ 6 │ 3.00 KiB │ a, b, c, d, ... │" in text
    of_four = Kernels((replace(many, copies=()),))
    assert "a, b, c, d │" in " ".join(render_plan(plan_with(replace(TODAY, kernels=of_four))).split())


def test_tables_are_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a terminal of 60 columns the tables are 60 columns wide, although a name is longer."""
    monkeypatch.setenv("COLUMNS", "60")
    parameters = {f"{'a_long_name.' * 6}weight": ParameterPlan(PartitionSpec("x"), (8, 4), 64)}
    tables = render_plan(replace(plan_with(TODAY), parameters=parameters)).splitlines()[5:]
    assert max(map(len, tables)) == 60
