"""What plans of unlike models answer, on unlike clusters: pricing or planning what they name confirms each figure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from autoshard import DoesNotFitError, Plan
from autoshard.errors import NotAvailableError
from autoshard.ir.answers import Outcome, WhyNot
from cost_models.hardware import Cluster as PricedCluster
from passes.driver.plan_and_lower import solve
from passes.driver.plan_of_choice import lowered_plan
from passes.planning.restrictions import ROLES, restrict
from passes.questions.explain import PlanAlternatives
from passes.questions.feature_names import NAMES
from passes.questions.roles import has_role
from passes.recipe_search.recipe_alternatives import FEATURES, RecipeAlternatives
from passes.recipe_search.richer_problems import richer_problems
from passes.solver.assignment import Solution
from tests.end_to_end.questioned import (
    MESHES,
    OTHERS,
    OWN,
    UNIFORM,
    plan_of_recipe,
    plan_of_specs,
    price,
)

SHARES = (None, 0.95, 0.6)
"""Of the memory that the fastest recipe takes; None: all of the device's."""


def confirm(name: str, cluster: PricedCluster, item: Outcome, *, as_compiled: bool = False) -> Plan:
    """A recipe that is stated has the price that is stated."""
    assert item.recipe is not None
    again = price(name, cluster, item.recipe, as_compiled=as_compiled)
    if item.fits:
        assert item.objective == item.step_time_s == again.predicted.step_time_s
        assert item.peak_memory_bytes == again.predicted.peak_memory_bytes
        assert item.breakdown == again.predicted.breakdown
        assert item.lower_bound is not None
        assert item.lower_bound <= item.objective
    else:
        assert item.smallest_bytes == again.predicted.peak_memory_bytes
        assert (item.objective, item.step_time_s, item.breakdown) == (None, None, None)
    return again


def confirm_compared(plan: Plan, item: Outcome, other: Plan) -> None:
    """So has the comparison with a plan of it."""
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


def answered(answer: WhyNot) -> Iterator[Outcome]:
    """What it states beside the plan; it can be printed, and be written as JSON."""
    assert answer.feature in str(answer)
    json.dumps(answer.to_json())
    yield from answer.variants
    if answer.reference is not None:
        yield answer.reference


def check_why_not(name: str, place: str, plan: Plan, feature: str) -> int:
    """Each way is done by its recipe, or, of what the plan does, is not; none is faster."""
    answer, asked = plan.why_not(feature), FEATURES[feature]
    assert plan.recipe is not None
    assert bool(answer.used) == asked.is_used(plan.recipe)
    assert bool(answer.variants) != (answer.missing in str(answer))
    for item in answered(answer):
        assert item.recipe is not None
        assert asked.is_used(item.recipe) != bool(answer.used)
        assert not item.fits or item.objective >= plan.objective * (1 - 1e-12)
        confirm_compared(plan, item, confirm(name, UNIFORM[place], item))
    return len(answer.variants)


def check_explain(name: str, place: str, plan: Plan, value: str) -> int:
    """The recipe of each other spec gives the value this spec; that of the plan is the first."""
    found = plan.explain(value)
    json.dumps(found.to_json())
    assert str(found).startswith(f"{value}: ")
    specs = [item.spec for item in (found.chosen, *found.others)]
    assert found.chosen.recipe == plan.recipe
    for item in (found.chosen, *found.others):
        again = confirm(name, UNIFORM[place], item)
        assert again.parameters[value].spec == item.spec
        assert not item.fits or item.objective >= plan.objective * (1 - 1e-12)
        confirm_compared(plan, item, again)
    assert specs[0] == plan.parameters[value].spec
    assert set(found.memory) <= {"parameters", "gradients", "optimizer state"}
    assert sum(found.memory.values()) <= plan.predicted.peak_memory_bytes
    return len(specs)


def check_limits(name: str, plan: Plan) -> int:
    """Each change has the price of its recipe on the changed cluster, and makes no step longer."""
    alternatives, found = plan.alternatives, plan.limits()
    assert isinstance(alternatives, RecipeAlternatives)
    richer = dict(richer_problems(alternatives.problem))
    json.dumps(found.to_json())
    assert "Peak memory" in str(found)
    assert len(found.variants) == len(richer)
    for item, (what, problem) in zip(found.variants, richer.items(), strict=True):
        assert item.name.startswith(f"{what}: ")
        assert item.fits
        assert item.objective <= plan.objective
        confirm(name, problem.cluster, item)
    return len(found.variants)


def check_recipe(name: str, place: str, share: float | None, question: str, number: int) -> int:
    """What a plan of a recipe answers; says how much was priced again."""
    plan = plan_of_recipe(name, place, share)
    if question == "limits":
        return check_limits(name, plan)
    if question == "explain":
        return check_explain(name, place, plan, list(plan.parameters)[number % len(plan.parameters)])
    return check_why_not(name, place, plan, question)


QUESTIONS = st.sampled_from(["limits", "explain", *FEATURES])
ANY_NUMBER = st.integers(0, 999)


@settings(max_examples=10)
@given(st.sampled_from(list(OWN)), st.sampled_from(list(UNIFORM)), st.sampled_from(SHARES), QUESTIONS, ANY_NUMBER)
def test_pricing_confirms_what_plans_of_recipes_answer(
    name: str, place: str, share: float | None, question: str, number: int
) -> None:
    """Of any figure that they name, for other ways, specs, and hardware."""
    try:
        plan_of_recipe(name, place, share)
    except DoesNotFitError:
        reject()
    check_recipe(name, place, share, question, number)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other people's models
@pytest.mark.parametrize("place", UNIFORM)
@pytest.mark.parametrize("name", OTHERS)
def test_pricing_confirms_what_plans_of_other_peoples_models_answer(name: str, place: str) -> None:
    """Every feature, a parameter of every tenth, and limits; with plenty of memory, and with little."""
    for share in SHARES:
        try:
            plan = plan_of_recipe(name, place, share)
        except DoesNotFitError:
            continue
        for question in ("limits", *FEATURES):
            check_recipe(name, place, share, question, 0)
        for number in range(0, len(plan.parameters), max(1, len(plan.parameters) // 10)):
            check_recipe(name, place, share, "explain", number)


def check_forecast(name: str, place: str, plan: Plan, feature: str) -> None:
    """Recipes with a feature, beside the best without: each has its price."""
    try:
        answer = plan.why_not(feature)
    except NotAvailableError:
        return
    for item in answered(answer):
        assert item.recipe is not None
        assert FEATURES[feature].is_used(item.recipe) == (item is not answer.reference)
        confirm(name, UNIFORM[place], item, as_compiled=True)


def check_bounds(item: Outcome, other: Solution) -> None:
    """Another search for the same, which began with known recipes, proves nothing else.

    Of large problems, which are searched until the gap is a thousandth, it may end with another plan.
    """
    assert item.objective is not None
    assert item.lower_bound is not None
    assert item.lower_bound <= other.cost * (1 + 1e-9)
    assert other.lower_bound <= item.objective * (1 + 1e-9)
    if other.cost <= other.lower_bound * (1 + 1e-9) and item.objective <= item.lower_bound * (1 + 1e-9):
        assert item.objective == pytest.approx(other.cost)


def check_role(place: str, plan: Plan, feature: str) -> None:
    """The best plan under an axis's role costs what is stated, and uses the axis so."""
    alternatives = plan.alternatives
    assert isinstance(alternatives, PlanAlternatives)
    planning, answer = alternatives.problem(), plan.why_not(feature)
    for item in answered(answer):
        axis = getattr(item, "name", "").rpartition(" ")[2]
        masks = restrict(planning, ROLES[feature], axis)
        assert masks is not None
        solution = solve(planning, replace(alternatives.options, with_baselines=False), masks).solution
        check_bounds(item, solve(planning, alternatives.options, masks).solution)
        found = lowered_plan(planning, solution.choice, solution.cost, None, UNIFORM[place], alternatives.options).plan
        assert item.objective == pytest.approx(solution.cost)
        assert item.step_time_s == pytest.approx(found.predicted.step_time_s)
        assert item.peak_memory_bytes == found.predicted.peak_memory_bytes
        assert plan.lower_bound is not None
        assert solution.cost >= plan.lower_bound * (1 - 1e-9)
        nodes = found.nodes
        assert has_role(planning, lambda node, nodes=nodes: (nodes[node].inputs, nodes[node].outputs), axis, feature)


def check_spec(name: str, place: str, mesh: str, plan: Plan, value: str) -> None:
    """Planning with each other spec as a constraint gives its figures."""
    found = plan.explain(value)
    assert found.chosen.step_time_s == plan.predicted.step_time_s
    for item in found.others:
        again = plan_of_specs(name, UNIFORM[place], mesh, constraints={value: item.spec})
        assert item.objective == pytest.approx(again.objective)
        assert item.step_time_s == pytest.approx(again.predicted.step_time_s)
        assert item.peak_memory_bytes == again.predicted.peak_memory_bytes
        compared = plan.compare(again)
        assert compared.step_time_s == (plan.predicted.step_time_s, again.predicted.step_time_s)


def check_specs(name: str, place: str, mesh: str, question: str, number: int) -> None:
    """What a plan of specs answers."""
    plan = plan_of_specs(name, UNIFORM[place], mesh)
    if question == "explain":
        check_spec(name, place, mesh, plan, list(plan.parameters)[number % len(plan.parameters)])
    elif question in ROLES:
        check_role(place, plan, question)
    else:
        check_forecast(name, place, plan, question)


SPEC_QUESTIONS = [question for question in ("explain", *NAMES) if question != "hsdp"]


@settings(max_examples=8)
@example("convolutions", "a node", "square", "data", 0)  # the batch was split at rest alone, and gathered for all else
@given(
    st.sampled_from(list(OWN)), st.sampled_from(list(UNIFORM)), st.just("line"), st.sampled_from(SPEC_QUESTIONS),
    ANY_NUMBER,
)  # fmt: skip
def test_planning_confirms_what_plans_of_specs_answer(
    name: str, place: str, mesh: str, question: str, number: int
) -> None:
    """Specs as constraints, roles of axes, and forecasts by pricing their recipes."""
    check_specs(name, place, mesh, question, number)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other people's models
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", OTHERS)
def test_planning_confirms_what_plans_of_other_peoples_models_answer(name: str, mesh: str) -> None:
    """On devices slow enough for something to be split."""
    for question in SPEC_QUESTIONS:
        check_specs(name, "slow devices", mesh, question, 3)
