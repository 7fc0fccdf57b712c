"""`Plan.compare` states the difference of two priced recipes, whichever field of the recipes differs."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoshard import Cluster, Plan, Recipe, RecipeError, Runtime
from autoshard.ir.execution import Execution
from autoshard.ir.plan_parts import Prediction
from passes.driver.pricing import price_execution
from passes.search.layers.price_model import CountedModel
from passes.search.recipe_plan import predict_recipe
from tests.passes.decoders import priced_sparse, sparse, tokens
from tests.passes.executions import under

MODEL = sparse()
CLUSTER = Cluster("h100_sxm", 1, 4)
BASE = Execution(data=2, zero=1, pipeline=2, global_batch=8)

CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    "data": ({"data": 1, "pipeline": 4},),
    "zero": ({"zero": 0}, {"zero": 2}, {"zero": 3}),
    "zero_group": ({"zero_group": 2}, {"zero_group": 1}),
    "tensor": ({"tensor": 2, "data": 1},),
    "sequence_parallel": ({"tensor": 2, "data": 1, "sequence_parallel": True},),
    "context": ({"context": 2, "data": 1},),
    "expert": ({"expert": 2},),
    "expert_tensor": ({"tensor": 2, "data": 1, "expert_tensor": 2},),
    "pipeline": ({"pipeline": 4, "data": 1},),
    "schedule": ({"schedule": "GPipe"}, {"schedule": "InterleavedZeroBubble"}, {"schedule": "1F1B"}),
    "virtual_stages": ({"virtual_stages": 2}, {"virtual_stages": 3, "schedule": "InterleavedZeroBubble"}),
    "stage_layers": ({"stage_layers": (2, 4)}, {"stage_layers": (5, 1)}),
    "micro_batch": ({"micro_batch": 2}, {"micro_batch": 4}),
    "global_batch": ({"global_batch": 16}, {"global_batch": 4}),
    "recompute": ({"recompute": "full"}, {"recompute": "selective"}),
    "early_stop": ({"early_stop": True}, {"early_stop": True, "recompute": "full"}),
    "attention": ({"attention": "flash2"},),
    "precision": ({"precision": "f16"},),
    "optimizer": ({"optimizer": "sgd"}, {"optimizer": "adam"}),
    "gradient_dtype": ({"gradient_dtype": "bf16"},),
    "separate_sum": ({"separate_sum": True},),
    "master_weights": ({"master_weights": False},),
    "frozen_masters": ({"frozen_masters": True},),
    "narrow_copies": ({"narrow_copies": False, "pipeline": 2},),
    "offload": ({"offload": "activations"},),
    "overlap_gradients": ({"overlap_gradients": False},),
    "overlap_parameters": ({"overlap_parameters": False},),
    "overlap_tensor": ({"overlap_tensor": False},),
    "overlap_pipeline": ({"overlap_pipeline": True},),
    "overlap_expert": ({"overlap_expert": True, "expert": 2},),
    "overlap_offload": ({"overlap_offload": False, "offload": "activations"},),
    "merged_dispatch": ({"merged_dispatch": True, "expert": 2},),
    "separate_experts": ({"separate_experts": True},),
    "folded_experts": ({"folded_experts": False, "expert": 2},),
    "bucket_bytes": ({"bucket_bytes": 10_000},),
    "listed_collectives": ({"listed_collectives": True}, {"listed_collectives": True, "zero": 3}),
    "fused": ({"fused": False},),
    "cuda_graph": ({"cuda_graph": True},),
    "blocking_launches": ({"blocking_launches": True},),
}
"""For each field of `Execution` and `Runtime`, changed values, with the values of other fields that a change needs."""

OTHERS = st.fixed_dictionaries(
    {},
    optional={
        "zero": st.sampled_from([1, 2, 3]),
        "micro_batch": st.sampled_from([1, 2]),
        "recompute": st.sampled_from(["none", "full"]),
        "offload": st.sampled_from(["none", "activations"]),
        "fused": st.booleans(),
        "overlap_gradients": st.booleans(),
        "gradient_dtype": st.sampled_from(["f32", "bf16"]),
    },
)
"""Drawn values of fields that are equal in both recipes."""


def changed(execution: Execution, change: dict[str, Any]) -> Execution:
    """Return an execution in which some fields, or fields of its runtime, are replaced."""
    own = {item.name for item in fields(Execution)}
    ours, theirs = ({key: change[key] for key in change if (key in own) is side} for side in (True, False))
    return replace(under(execution, **theirs), **ours)


def plan_of(recipe: Execution) -> Plan:
    """Return the priced plan of a recipe."""
    return price_execution(MODEL, CLUSTER, recipe, tokens())


def check(one: Execution, other: Execution) -> None:
    """Check that the comparison of two recipes' plans has the figures of both, and that its changes add up.

    Each figure must equal that of a model for which nothing was priced before.
    """
    found = plan_of(one).compare(plan_of(other))
    differing = [item.name for item in fields(Recipe) if getattr(one, item.name) != getattr(other, item.name)]
    assert found.recipe_fields == {field: (getattr(one, field), getattr(other, field)) for field in differing}
    assert found.recipes == (one.recipe, other.recipe)
    for index, recipe in enumerate((one, other)):
        again = priced_afresh(recipe)
        assert found.step_time_s[index] == again.step_time_s
        assert found.peak_memory_bytes[index] == again.peak_memory_bytes
        assert found.tokens_per_s[index] == again.tokens_per_s
        assert {part: pair[index] for part, pair in found.breakdown.items() if pair[index]} == {
            part: seconds for part, seconds in again.breakdown.items() if seconds
        }
        assert {part: pair[index] for part, pair in found.memory_breakdown.items() if pair[index]} == dict(
            again.memory_breakdown
        )
    changes = [second - first for first, second in found.breakdown.values()]
    assert sum(changes) == pytest.approx(found.step_time_s[1] - found.step_time_s[0], abs=1e-9 * found.step_time_s[0])
    assert (
        sum(b - a for a, b in found.memory_breakdown.values())
        == found.peak_memory_bytes[1] - found.peak_memory_bytes[0]
    )
    assert all(f"recipe: {field}" in str(found) for field in differing)


@cache
def priced_afresh(recipe: Execution) -> Prediction:
    """Return the prediction of a recipe for a model without cached prices."""
    counted = priced_sparse().counted
    unpriced = CountedModel(counted.blocks, counted.tokens, counted.count, counted.has_experts)
    return predict_recipe(unpriced, recipe, CLUSTER)


def test_every_field_has_changes() -> None:
    """`CHANGES` has an entry for each field of `Execution` and `Runtime` that a price depends on."""
    known = {item.name for kind in (Execution, Runtime) for item in fields(kind)}
    restricts = {"schedules", "zero_stages", "zero_in_pipelines", "offloads_in_pipelines"}  # a price is of any recipe
    assert set(CHANGES) == known - {"runtime", "name"} - restricts


@pytest.mark.sample(12)
@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_field_makes_the_difference_that_pricing_both_makes(field: str) -> None:
    """Comparing the base recipe with a recipe that differs in one field gives the figures of both."""
    for change in CHANGES[field]:
        other = changed(BASE, change)
        assert other != BASE
        check(BASE, other)


@settings(max_examples=12)
@given(st.sampled_from(sorted(CHANGES)), st.data(), OTHERS)
def test_it_does_so_whatever_the_other_fields_are(field: str, data: st.DataObject, others: dict[str, Any]) -> None:
    """The comparison is right for a drawn change and any drawn values of the other fields."""
    change = data.draw(st.sampled_from(CHANGES[field]))
    try:
        one = changed(BASE, others)
        other = changed(one, change)
        _ = [plan_of(recipe) for recipe in (one, other)]
    except RecipeError:
        assume(condition=False)
    check(one, other)
