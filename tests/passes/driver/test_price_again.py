"""`why_not` and `limits` of the plan of a recipe: each figure is checked against the prices of all recipes."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

import autoshard
from autoshard import Cluster, Plan
from autoshard.errors import InvalidSpecError, NotAvailableError
from autoshard.ir.execution import Execution
from autoshard.ir.recipe import RECOMPUTE
from cost_models.hardware import Cluster as PricedCluster
from passes.driver.price_again import PriceAgain
from passes.questions.ask import Questions
from passes.questions.features import FEATURES
from passes.search.recipe_problem import RecipeProblem
from passes.search.recipe_space import keeps
from tests.passes.decoders import PRICED, dense, sparse, tokens

CLUSTER = Cluster("h100_sxm", 1, 4)
MODELS = {"dense": dense(4), "sparse": sparse()}


@cache
def make_plan(name: str, memory_budget: int | None = None) -> Plan:
    """Return the plan of the fastest recipe of a small model."""
    return autoshard.plan(
        MODELS[name],
        CLUSTER,
        example_inputs=tokens(),
        optimizer="adamw",
        runtime=PRICED,
        global_batch=4,
        memory_budget=memory_budget,
    )


@cache
def every_recipe(name: str) -> list[tuple[float, int, Execution]]:
    """Return each searched recipe with its step time in seconds and its peak memory in bytes."""
    problem = problem_of(make_plan(name))
    pricer = problem.pricer
    groups = {"zero_group": (None, *range(2, problem.cluster.size))}
    recipes = (recipe for name in RECOMPUTE for recipe in problem.space({"recompute": (name,), **groups}).recipes())
    return [(pricer.time_s(recipe), pricer.memory_bytes(recipe), recipe) for recipe in recipes]


def problem_of(plan: Plan) -> RecipeProblem:
    """Return the search problem that a plan's recipe solves."""
    assert isinstance(plan.alternatives, Questions)
    assert isinstance(plan.alternatives.replan, PriceAgain)
    return plan.alternatives.replan.search.problem


@pytest.mark.parametrize("name", ["dense", pytest.param("sparse", marks=pytest.mark.slow)])
@pytest.mark.parametrize("feature", FEATURES)
def test_the_figures_are_those_of_the_best_recipe_that_does_it(name: str, feature: str) -> None:
    """For each way to have or avoid a feature, `why_not` gives the time and memory of the fastest recipe that fits."""
    plan = make_plan(name)
    assert plan.recipe is not None
    answer = plan.why_not(feature)
    assert bool(answer.used) == FEATURES[feature].is_used(plan.recipe)
    if feature == "expert" and name == "dense":
        assert not answer.variants
        assert "expert: the model has no experts to share out." in str(answer)
        return
    ways = {name: (only,) for name, only in FEATURES[feature].ways.items()}
    ways = {f"without {feature}": FEATURES[feature].without} if answer.used else ways
    stated = {item.name.partition(":")[0]: item for item in answer.variants}
    for way, parts in ways.items():
        assert plan.memory_budget is not None
        costs = [
            (time, memory)
            for time, memory, recipe in every_recipe(name)
            if memory <= plan.memory_budget and any(keeps(recipe, only) for only in parts)
        ]
        assert (way in stated) == bool(costs)
        if not costs:
            assert "no plan for these devices and this batch has it" in str(answer)
            continue
        best, item = min(costs), stated[way]
        assert item.peak_memory_bytes == best[1]
        assert item.step_time_s == best[0] >= plan.objective
        assert item.breakdown is not None
        assert sum(item.breakdown.values()) == pytest.approx(best[0])


def test_memory_is_named_where_it_keeps_a_feature_out() -> None:
    """If every recipe with a feature exceeds the memory limit, `why_not` states the least memory of these recipes."""
    least = problem_of(make_plan("dense")).smallest().objective
    plan = make_plan("dense", memory_budget=int(least))
    answer = plan.why_not("data")
    (item,) = answer.variants
    sizes = [memory for _, memory, recipe in every_recipe("dense") if recipe.zero == 0 and recipe.data > 1]
    assert (item.fits, item.smallest_bytes) == (False, min(sizes))
    assert min(sizes) > least
    assert re.search("no plan with it fits in memory", str(answer))


def test_hybrid_sharding_is_over_less_than_all_replicas() -> None:
    """`why_not` of hybrid sharding gives the time and memory of a plan constrained to ZeRO-3 in groups of two."""
    constraints = {"tensor": 1, "context": 1, "pipeline": 1, "zero": (0, 3), "zero_group": (2, None)}
    options = {
        "example_inputs": tokens(),
        "optimizer": "adamw",
        "runtime": PRICED,
        "global_batch": 4,
        "memory_budget": 10**9,
    }
    pinned = {**constraints, "zero": 3, "zero_group": 2}
    hybrid = autoshard.plan(MODELS["dense"], CLUSTER, constraints=pinned, **options)
    assert hybrid.recipe is not None
    assert hybrid.recipe.words.startswith("data 4 (ZeRO-3 in groups of 2)")
    assert hybrid.why_not("hsdp").used
    plan = autoshard.plan(MODELS["dense"], CLUSTER, constraints=constraints, **options)
    (found,) = plan.why_not("hsdp").variants
    assert (found.step_time_s, found.peak_memory_bytes) == (hybrid.objective, hybrid.predicted.peak_memory_bytes)


def test_a_feature_that_constraints_ask_for_has_no_other_plan() -> None:
    """If constraints require a feature, `why_not` says that no plan avoids this feature."""
    arguments = {"example_inputs": tokens(), "optimizer": "adamw", "runtime": PRICED, "global_batch": 4}
    plan = autoshard.plan(MODELS["dense"], CLUSTER, constraints={"tensor": 2}, **arguments)
    answer = plan.why_not("tensor")
    assert answer.used
    assert not answer.variants
    assert "no other plan: no plan for these devices, this batch and these constraints is without it." in str(answer)
    assert not plan.why_not("zero-1").missing


def test_what_is_not_answered_is_said() -> None:
    """`why_not` refuses an unknown feature and lists the known features.

    `explain` is refused, because recipes choose no specs.
    """
    with pytest.raises(InvalidSpecError, match=r"ask for one of data \(ddp, .*zero-1, zero-2, fsdp \(zero-3"):
        make_plan("dense").why_not("magic")
    with pytest.raises(NotAvailableError, match="this plan is the price of a recipe under runtime="):
        make_plan("dense").explain("words.weight")


@pytest.mark.parametrize("name", ["dense", pytest.param("sparse", marks=pytest.mark.slow)])
def test_limits_are_those_of_planning_with_more(name: str) -> None:
    """`limits` states the step times of new plans with more memory or faster matrix products.

    More memory never lengthens the step, and its worth per byte follows from the stated times.
    """
    sizes = sorted(memory for _, memory, _ in every_recipe(name))
    plan = make_plan(name, memory_budget=sizes[len(sizes) // 20])
    assert plan.memory_budget is not None
    found = plan.limits()
    stated = {item.name: item.step_time_s for item in found.variants}
    more = make_plan(name, memory_budget=int(1.1 * plan.memory_budget))
    assert stated["10 % more memory"] == more.objective
    assert stated["twice the memory"] == make_plan(name, memory_budget=2 * plan.memory_budget).objective
    assert stated["memory without limit"] == make_plan(name).objective
    assert found.memory_worth_s_per_byte == pytest.approx(
        (plan.objective - more.objective) / (0.1 * plan.memory_budget)
    )
    steps = [plan.objective, *(stated[key] for key in ("10 % more memory", "twice the memory", "memory without limit"))]
    assert steps == sorted(steps, reverse=True)
    unit = CLUSTER.node.device
    faster = replace(unit, peak_flops={dtype: 1.1 * peak for dtype, peak in unit.peak_flops.items()})
    cluster = PricedCluster(CLUSTER.node.with_device(faster), 1, 4)
    again = autoshard.plan(
        MODELS[name], cluster, example_inputs=tokens(), optimizer="adamw", runtime=PRICED, global_batch=4,
        memory_budget=plan.memory_budget,
    )  # fmt: skip
    assert stated["10 % faster matrix products"] == again.objective
    assert found.binding in [item.name for item in found.variants]
    assert found.binding in str(found)


def test_memory_that_is_plenty_is_worth_nothing() -> None:
    """More memory than a plan uses is worth nothing."""
    found = make_plan("dense").limits()
    assert found.memory_worth_s_per_byte == 0.0
    assert "A GiB more" not in str(found)
