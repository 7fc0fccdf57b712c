"""Plans as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.ir.kernels import Kernels, KernelUse
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import NodePlan, ParameterPlan, Prediction
from autoshard.ir.recipe import Recipe
from autoshard.ir.spec import PartitionSpec
from autoshard.report.printer import in_words, render_plan, running_lines, times_chosen


def plan_with(predicted: Prediction) -> Plan:
    """A plan of nothing, with a prediction."""
    return Plan(
        mesh=Mesh({"x": 2}), program_digest="", inputs={}, nodes={}, outputs={}, parameters={}, predicted=predicted,
        objective=1.0, lower_bound=None, search_time_s=0.0, hardware="h100_sxm:1x2",
    )  # fmt: skip


TODAY = Prediction(2e-3, 2**30, {"forward compute": 2e-3}, {"parameters": 2**30}, mfu=0.5, hfu=0.6)


def test_what_is_not_known_is_not_printed() -> None:
    """No interval, no overlap, no tokens."""
    text = render_plan(plan_with(TODAY))
    assert "step 2 ms, peak memory 1.00 GiB" in text
    assert "forecast" not in text
    assert "hidden" not in text
    assert "tokens" not in text


def test_a_sentence_says_where_parameters_lie() -> None:
    """By the words for layouts of a whole step, and by specs without an update; small parts are left out."""
    split, whole = PartitionSpec("x"), PartitionSpec()
    without = {
        "a": ParameterPlan(split, (75, 1), 0),
        "b": ParameterPlan(whole, (24,), 0),
        "c": ParameterPlan(whole, (1,), 0),
    }
    plan = replace(plan_with(TODAY), parameters=without)
    said = (
        "Inputs are whole on every rank; 75% of parameters are split over x, 25% of parameters are whole on every rank."
    )
    assert in_words(plan) == [said]
    words = {"a": "ZeRO-3 over x; copied over y", "b": "split over x; copied over y", "c": "copied over x, y"}
    laid_out = {name: replace(item, layout=words[name]) for name, item in without.items()}
    told = in_words(replace(plan, parameters=laid_out, nodes={"input_0": NodePlan((), (split,))}))
    assert told == [
        "Inputs are split over x; 75% of parameters are ZeRO-3 over x, copied over y, "
        "24% of parameters are split over x, copied over y."
    ]
    assert told[0] in " ".join(
        render_plan(replace(plan, parameters=laid_out, nodes={"input_0": NodePlan((), (split,))})).split()
    )


def test_batch_and_whether_it_runs_are_told() -> None:
    """By the recipe in sequences; without one by the inputs, of a micro-batch where a step has several."""
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


def test_a_forecast_says_so() -> None:
    """With its interval, what it hides, and both utilisations."""
    predicted = replace(
        TODAY, overlaps=True, overlapped={"x": 1e-3}, step_time_interval_s=(1.8e-3, 2.2e-3), interval_coverage=0.9
    )
    text = render_plan(plan_with(predicted))
    assert "step 2 ms (90%: 1.8 ms to 2.2 ms)" in text
    assert "A forecast: communication runs beside computation." in text
    for row in ("hidden: communication over x │ 1 ms", "model FLOPs utilisation", "50.0%", "60.0%"):
        assert row in " ".join(text.split())


def test_communication_has_an_exposed_and_a_hidden_part() -> None:
    """By mesh axis; the exposed one is a part of the step, and stands before the hidden one."""
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


def test_baselines_stand_beside_the_objective() -> None:
    """They are what the search minimised, not the predicted step; so none of them looks faster than the plan."""
    plan = replace(plan_with(TODAY), objective=1e-3, baselines={"data parallel": 1.25e-3, "ZeRO-1": None})
    text = " ".join(render_plan(plan).split())
    for row in (
        "objective of the search │ 1 ms", "baseline: data parallel │ 1.25 ms, 1.25 x", "baseline: ZeRO-1 │ does not fit"
    ):  # fmt: skip
        assert row in text
    assert "objective of the search" not in render_plan(plan_with(TODAY))


def test_a_known_recipe_below_the_plan_is_no_faster_step() -> None:
    """Steps as lowered choose among plans whose sums are close: 0.85 x would read as a plan that is not the fastest."""
    plan = replace(plan_with(TODAY), objective=1e-3, baselines={"data parallel": 1e-3, "Megatron TP+SP": 8.5e-4})
    text = " ".join(render_plan(plan).split())
    assert "baseline: data parallel │ 1 ms, 1.00 x" in text
    assert "baseline: Megatron TP+SP │ 850 us, less by this sum alone: the step as lowered decides" in text
    assert "0.85" not in text
    assert times_chosen(0.9999e-3, plan) == "1.00 x"
    assert times_chosen(0.99e-3, plan) == "less by this sum alone: the step as lowered decides"


def test_kernels_alike_share_a_row() -> None:
    """With what they save together, and the first of the calls that the first stands for."""
    one = KernelUse("triton_gated", "forward", "mul", {"silu": 1.0, "mul": 1.0}, (), (), 1e-3, 1, 100, 2, 1024)
    many = replace(one, name="triton_five", stands_for=dict.fromkeys("abcd", 1.0), copies=(("e", "a", 1.0),), times=3)
    kernels = Kernels((one, replace(one, times=3), many), breakdown_without={"forward compute": 3e-3})
    text = " ".join(render_plan(plan_with(replace(TODAY, kernels=kernels))).split())
    assert "triton_gated │ forward │ 4 │ 8 │ 4.00 KiB │ silu, mul │" in text
    assert "triton_five │ forward │ 3 │ 6 │ 3.00 KiB │ a, b, c, d, ... │" in text
    of_four = Kernels((replace(many, copies=()),))
    assert "a, b, c, d │" in " ".join(render_plan(plan_with(replace(TODAY, kernels=of_four))).split())


def test_tables_are_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long name is folded, not torn by the terminal."""
    monkeypatch.setenv("COLUMNS", "60")
    parameters = {f"{'a_long_name.' * 6}weight": ParameterPlan(PartitionSpec("x"), (8, 4), 64)}
    tables = render_plan(replace(plan_with(TODAY), parameters=parameters)).splitlines()[5:]
    assert max(map(len, tables)) == 60
