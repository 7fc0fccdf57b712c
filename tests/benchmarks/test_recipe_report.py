"""Why a plan is cheaper than a published recipe: the way from one to the other, whose the saving was, the report."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import Cluster, RecipeError
from autoshard.ir.execution import Execution
from passes.search.recipe_space import RecipeSpace
from passes.recipes.recipe_plan import predict_recipe
from passes.sections.price_model import CountedModel
from tests.benchmarks.published_runs import read_rows, recipe_of
from tests.benchmarks.recipe_report import factors, measured_pairs, report, step_factors
from tests.benchmarks.recipe_runs import Compared, Priced, Reason, lower, read_lines, write_line
from tests.benchmarks.recipe_steps import PARTS, Step, Taken, differing, steps_between, with_parts
from tests.benchmarks.run_software import OFFERED, is_offered, lacking
from tests.passes.decoders import priced_dense

ROWS = read_rows()
CLUSTER = Cluster("h100_sxm", 1, 4)


@cache
def counted() -> CountedModel:
    """A small model, traced once."""
    return priced_dense(4).counted


@cache
def recipes() -> list[Execution]:
    """Every recipe for it."""
    return list(RecipeSpace(counted(), CLUSTER.size, Execution(global_batch=16), least_tokens=8).recipes())


def price(recipe: Execution) -> Taken:
    """Time and memory of a step of a recipe."""
    prediction = predict_recipe(counted(), recipe, CLUSTER)
    return Taken(prediction.step_time_s, prediction.peak_memory_bytes)


@settings(max_examples=10)
@given(st.data())
def test_the_way_between_two_recipes_ends_at_the_second(data: st.DataObject) -> None:
    """Each part changes once; the factors' product is the ratio of the prices; every price is that of a recipe."""
    start, end = (recipes()[data.draw(st.integers(0, len(recipes()) - 1))] for _ in range(2))
    seen: dict[Taken, Execution] = {}

    def noted(recipe: Execution) -> Taken:
        return seen.setdefault(price(recipe), recipe) and price(recipe)

    steps = steps_between(start, end, noted)
    changed = [name for step in steps for name in step.parts]
    assert len(changed) == len(set(changed))
    assert set(changed) <= set(differing(start, end))
    assert all(step.taken in seen for step in steps)
    assert not steps or steps[-1].taken == price(end)


def test_parts_that_cannot_change_alone_change_together() -> None:
    """Here where none of the recipes between can be priced."""
    start = Execution(data=2, pipeline=2, micro_batch=8, global_batch=16)
    end = replace(start, data=4, pipeline=1, micro_batch=4)

    def refusing(recipe: Execution) -> Taken:
        if recipe != end:
            raise RecipeError("no price")
        return price(recipe)

    assert steps_between(start, end, refusing) == [Step(("micro-batch", "axes"), price(end))]
    with pytest.raises(RecipeError):
        with_parts(start, end, ["axes"])


def test_what_new_axes_have_no_use_for_is_dropped() -> None:
    """Schedules without a pipeline, sequence parallelism without tensor ranks."""
    start = Execution(tensor=2, pipeline=2, sequence_parallel=True, schedule="InterleavedZeroBubble", virtual_stages=2)
    assert with_parts(start, Execution(data=4), ["axes"]) == Execution(data=4)


def test_every_field_of_the_space_is_in_one_part() -> None:
    """So that the way always arrives."""
    named = [field for fields in PARTS.values() for field in fields]
    assert len(named) == len(set(named))
    varying = {name for name in Execution.__slots__ if len({getattr(recipe, name) for recipe in recipes()}) > 1}
    assert varying <= set(named)


@pytest.mark.parametrize("source", OFFERED)
def test_published_recipes_are_within_what_their_software_offered(source: str) -> None:
    """Else the table of software is wrong."""
    published = [recipe_of(row) for row in ROWS if row["source"]["key"] == source and row["dtype"][:5] != "nvfp4"]
    assert published
    assert [lacking(recipe, source) for recipe in published if not is_offered(recipe, source)] == []


def test_what_software_lacked_is_named() -> None:
    """Features are named by the restrictions that refuse least."""
    plan = Execution(data=2, pipeline=2, zero=2, schedule="ZBVZeroBubble", virtual_stages=2, recompute="selective")
    assert lacking(plan, "bigscience") == (
        "schedule ZBVZeroBubble",
        "selective recomputation",
        "ZeRO-2 with a pipeline",
    )
    assert lacking(Execution(data=8, zero=2), "megatron-bridge") == ()
    piped, plain = Execution(pipeline=2, offload="activations"), Execution(data=2, offload="activations")
    assert lacking(piped, "megatron-bridge") == ("activations on the host",) == lacking(plain, "bigscience")
    assert lacking(plain, "megatron-bridge") == () == lacking(plain, "mosaicml")


def _compared(run: str, seconds: float, plan_s: float, measured_s: float, reason: Reason | None = None) -> Compared:
    published, found = Priced("theirs", seconds, {"parameters": 6}), Priced("ours", plan_s, {"parameters": 7})
    return Compared(run, "bigscience", "task", 8, measured_s, published, found, plan_s, True, 1.0, reason)


REASON = Reason(
    (Step(("recomputation",), Taken(7.0, 9)), Step(("ZeRO", "axes"), Taken(4.0, 7))),
    ("schedule ZBVZeroBubble",),
    5.0,
    6.0,
)
RUNS = (_compared("slow", 10.0, 4.0, 9.0, REASON), _compared("fast", 8.0, 4.0, 8.0, REASON))


def test_factors_multiply_to_the_ratio() -> None:
    """Factors of kinds and of steps multiply to the ratio; a kind that cannot be told takes off nothing."""
    assert factors(RUNS[0], RUNS) == pytest.approx(
        {"published": 0.8, "offered": 0.75, "memory": 5 / 6, "features": 0.8}
    )
    assert math.prod(factors(RUNS[0], RUNS).values()) == pytest.approx(RUNS[0].ratio)
    assert math.prod(factor for _, factor in step_factors(RUNS[0])) == pytest.approx(RUNS[0].ratio)
    tight = replace(RUNS[0], reason=replace(REASON, roomy_s=None))
    assert factors(tight, RUNS)["offered"] == 1.0


def test_pairs_of_one_task_compare_prices_with_measurements() -> None:
    """The cheaper over the dearer."""
    assert list(measured_pairs(RUNS)) == [(0.8, 8.0 / 9.0)]


def test_runs_are_kept_as_lines(tmp_path: Path) -> None:
    """And read back as they were, with a reason or without."""
    runs = [RUNS[0], _compared("no reason", 1.0, 1.0, 1.0), replace(RUNS[1], found=None, reason=None)]
    path = tmp_path / "runs.jsonl"
    assert read_lines(path) == []
    path.write_text("".join(map(write_line, runs)))
    assert read_lines(path) == runs


def test_a_run_that_is_worse_or_does_not_fit_is_told() -> None:
    """It does not hold, and the report names it."""
    worse, large = _compared("worse", 1.0, 1.1, 1.0), replace(_compared("large", 1.0, 0.9, 1.0), device_bytes=6)
    assert [run.holds for run in (*RUNS, worse, large)] == [True, True, False, False]
    assert "above a recipe that fits: worse, large." in report([*RUNS, worse, large])
    assert lower([*RUNS, worse]) == list(RUNS)
    assert "| bigscience | 1 | 0.400 | 0.850 | 1, 0 |" in report([replace(RUNS[0], on_device_s=8.5), RUNS[1]])
    assert "| slow | 0.400 | theirs | ours | recomputation 0.700, 0; ZeRO and axes 0.400, 0 |" in report(RUNS)
