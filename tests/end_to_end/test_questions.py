"""Pricing or planning again confirms the figures that plans of different models on different clusters answer."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from autoshard import DoesNotFitError, Plan
from autoshard.ir.answers import Outcome, Variant, WhyNot
from cost_models.hardware import Cluster as PricedCluster
from passes.planning.restrictions import ROLES
from passes.questions.change import Change
from passes.questions.faster_hardware import FASTER
from passes.questions.features import FEATURES, NAMES
from passes.questions.roles import has_role
from tests.end_to_end.questioned import (
    MESHES,
    OTHERS,
    OWN,
    UNIFORM,
    plan_of_recipe,
    plan_of_specs,
    price,
    replan_of,
)

SHARES = (None, 0.95, 0.6)
"""Memory budgets as shares of the memory that the fastest recipe takes; None is all of the device's memory."""


def confirm(name: str, cluster: PricedCluster, item: Outcome) -> Plan:
    """Price the recipe of an outcome, check that the figures are equal, and return the priced plan."""
    assert item.recipe is not None
    again = price(name, cluster, item.recipe)
    if item.fits:
        assert item.step_time_s == again.predicted.step_time_s
        assert item.peak_memory_bytes == again.predicted.peak_memory_bytes
        assert item.breakdown == again.predicted.breakdown
    else:
        assert item.step_time_s is None
        assert item.breakdown is None
    return again


def confirm_compared(plan: Plan, item: Outcome, other: Plan) -> None:
    """Check that `Plan.compare` of a plan and the outcome's priced plan has the figures of both."""
    found = plan.compare(other)
    if item.fits:
        assert found.step_time_s == (plan.predicted.step_time_s, item.step_time_s)
        assert found.peak_memory_bytes == (plan.predicted.peak_memory_bytes, item.peak_memory_bytes)
        assert item.breakdown is not None
        assert {part: pair[1] for part, pair in found.breakdown.items() if part in item.breakdown} == item.breakdown
        assert sum(pair[1] - pair[0] for pair in found.breakdown.values()) == pytest.approx(
            found.step_time_s[1] - found.step_time_s[0], abs=1e-9 * found.step_time_s[0]
        )
    assert found.recipes == (plan.recipe, item.recipe)


def answered(answer: WhyNot) -> tuple[Variant, ...]:
    """Check that an answer can be printed and written as JSON, and return its variants."""
    assert answer.feature in str(answer)
    json.dumps(answer.to_json())
    return answer.variants


def check_why_not(name: str, place: str, plan: Plan, feature: str) -> int:
    """Check that each recipe of `why_not` uses, or drops, the feature, is priced right and no faster.

    Return the number of recipes.
    """
    answer, asked = plan.why_not(feature), FEATURES[feature]
    assert plan.recipe is not None
    assert bool(answer.used) == asked.is_used(plan.recipe)
    for item in answered(answer):
        if item.fits:
            assert item.recipe is not None
            assert asked.is_used(item.recipe) != bool(answer.used)
            assert item.step_time_s >= plan.predicted.step_time_s * (1 - 1e-12)
            confirm_compared(plan, item, confirm(name, UNIFORM[place], item))
    return len(answer.variants)


def check_limits(name: str, place: str, plan: Plan) -> int:
    """Check that each change of `limits` has the price of its recipe on the changed cluster, and is no slower.

    Return the number of changes.
    """
    found = plan.limits()
    json.dumps(found.to_json())
    assert "Peak memory" in str(found)
    faster = {name: change(UNIFORM[place]) for name, change in FASTER.items()}
    assert len(found.variants) == 3 + sum(cluster is not None for cluster in faster.values())
    for item in found.variants:
        assert item.fits
        assert item.step_time_s is not None
        assert item.step_time_s <= plan.predicted.step_time_s
        confirm(name, faster.get(item.name) or UNIFORM[place], item)
    return len(found.variants)


def check_recipe(name: str, place: str, share: float | None, question: str) -> int:
    """Check the answers of a recipe's plan to `limits` or about a feature; return their number."""
    plan = plan_of_recipe(name, place, share)
    if question == "limits":
        return check_limits(name, place, plan)
    return check_why_not(name, place, plan, question)


QUESTIONS = st.sampled_from(["limits", *FEATURES])
ANY_NUMBER = st.integers(0, 999)


@settings(max_examples=10)
@given(st.sampled_from(list(OWN)), st.sampled_from(list(UNIFORM)), st.sampled_from(SHARES), QUESTIONS)
def test_pricing_confirms_what_prices_of_recipes_answer(
    name: str, place: str, share: float | None, question: str
) -> None:
    """Pricing again confirms the answers of recipe plans of small models."""
    try:
        plan_of_recipe(name, place, share)
    except DoesNotFitError:
        reject()
    check_recipe(name, place, share, question)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other people's models
@pytest.mark.parametrize("place", UNIFORM)
@pytest.mark.parametrize("name", OTHERS)
def test_pricing_confirms_what_plans_of_other_peoples_models_answer(name: str, place: str) -> None:
    """Pricing again confirms the answers of recipe plans of public models, with much memory and with little."""
    for share in SHARES:
        try:
            plan_of_recipe(name, place, share)
        except DoesNotFitError:
            continue
        for question in ("limits", *FEATURES):
            check_recipe(name, place, share, question)


def check_feature(plan: Plan, feature: str) -> None:
    """Check that planning again with an axis in a feature's role gives the figures of `why_not`."""
    again, answer = replan_of(plan), plan.why_not(feature)
    for item in answered(answer):
        if not item.name.startswith(f"{feature} over "):
            assert item.fits == (item.step_time_s is not None)
            continue
        axis = item.name.rpartition(" ")[2]
        found = again(plan, Change(roles={axis: ROLES[feature]}))
        assert item.step_time_s == found.predicted.step_time_s
        assert item.peak_memory_bytes == found.predicted.peak_memory_bytes
        plans = found.stages or (found,)
        specs = [lambda node, nodes=each.nodes: (nodes[node].inputs, nodes[node].outputs) for each in plans]
        assert has_role(list(zip(again.problems(), specs, strict=True)), axis, feature)


def check_spec(name: str, place: str, mesh: str, plan: Plan, value: str) -> None:
    """Check that planning with each other spec as a constraint gives the figures of `explain`."""
    found = plan.explain(value)
    assert found.chosen.step_time_s == plan.predicted.step_time_s
    for item in found.others:
        again = plan_of_specs(name, UNIFORM[place], mesh, constraints={value: item.spec})
        assert item.step_time_s == pytest.approx(again.predicted.step_time_s)
        assert item.peak_memory_bytes == again.predicted.peak_memory_bytes
        compared = plan.compare(again)
        assert compared.step_time_s == (plan.predicted.step_time_s, again.predicted.step_time_s)


def check_specs(name: str, place: str, mesh: str, question: str, number: int) -> None:
    """Check the answer of a plan of specs to one question, `explain` or a feature's name."""
    plan = plan_of_specs(name, UNIFORM[place], mesh)
    if question == "explain":
        check_spec(name, place, mesh, plan, list(plan.parameters)[number % len(plan.parameters)])
    else:
        check_feature(plan, question)


SPEC_QUESTIONS = [question for question in ("explain", *NAMES) if question != "hsdp"]


@pytest.mark.slow
@settings(max_examples=8)
@example("convolutions", "a node", "square", "data", 0)  # the batch was split at rest alone, and gathered for all else
@given(
    st.sampled_from(list(OWN)), st.sampled_from(list(UNIFORM)), st.just("line"), st.sampled_from(SPEC_QUESTIONS),
    ANY_NUMBER,
)  # fmt: skip
def test_planning_confirms_what_plans_of_specs_answer(
    name: str, place: str, mesh: str, question: str, number: int
) -> None:
    """Planning again with a spec or role as constraint confirms the answers of plans of specs of small models."""
    check_specs(name, place, mesh, question, number)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other people's models
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OTHERS)
def test_planning_confirms_what_plans_of_other_peoples_models_answer(name: str, mesh: str) -> None:
    """Planning again confirms the answers for public models, on devices so slow that plans split values."""
    for question in SPEC_QUESTIONS:
        check_specs(name, "slow devices", mesh, question, 3)
