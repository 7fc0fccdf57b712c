"""`plan.why_not` for plans of recipes: what it states is what pricing every recipe that does it gives."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

import autoshard
from autoshard import Cluster, Plan
from autoshard.errors import InvalidSpecError
from autoshard.ir.execution import Execution
from autoshard.ir.recipe import RECOMPUTE
from autoshard.ir.spec import PartitionSpec
from cost_models.hardware import Cluster as PricedCluster
from passes.recipe_search.explain_recipe import find_value, spec_of
from passes.recipe_search.recipe_alternatives import FEATURES, RecipeAlternatives
from passes.recipe_search.recipe_problem import RecipeProblem
from passes.recipe_search.recipe_space import keeps
from tests.passes.decoders import PRICED, dense, sparse, tokens

CLUSTER = Cluster("h100_sxm", 1, 4)
MODELS = {"dense": dense(4), "sparse": sparse()}


@cache
def make_plan(name: str, memory_budget: int | None = None) -> Plan:
    """The fastest recipe of a small model."""
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
    """Time and memory of all that are searched."""
    problem = alternatives(make_plan(name)).problem
    assert isinstance(problem, RecipeProblem)
    pricer = problem.pricer
    recipes = (recipe for name in RECOMPUTE for recipe in problem.space({"recompute": name}).recipes())
    return [(pricer.time_s(recipe), pricer.memory_bytes(recipe), recipe) for recipe in recipes]


def alternatives(plan: Plan) -> RecipeAlternatives:
    """What answers for a plan."""
    assert isinstance(plan.alternatives, RecipeAlternatives)
    return plan.alternatives


@pytest.mark.parametrize("name", ["dense", pytest.param("sparse", marks=pytest.mark.slow)])
@pytest.mark.parametrize("feature", FEATURES)
def test_the_figures_are_those_of_the_best_recipe_that_does_it(name: str, feature: str) -> None:
    """Or, where the plan does it, of the best that does not; by pricing all."""
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
            assert "no recipe for 4 devices and this batch has it" in str(answer)
            continue
        best, item = min(costs), stated[way]
        assert (item.objective, item.peak_memory_bytes) == (item.step_time_s, best[1])
        assert item.objective == best[0] >= plan.objective
        assert item.breakdown is not None
        assert sum(item.breakdown.values()) == pytest.approx(best[0])


def test_memory_is_named_where_it_keeps_a_feature_out() -> None:
    """With the least that does it."""
    least = alternatives(make_plan("dense")).problem.smallest().objective
    plan = make_plan("dense", memory_budget=int(least))
    answer = plan.why_not("data")
    (item,) = answer.variants
    sizes = [memory for _, memory, recipe in every_recipe("dense") if recipe.zero == 0 and recipe.data > 1]
    assert (item.fits, item.smallest_bytes) == (False, min(sizes))
    assert min(sizes) > least
    assert re.search("no plan with it fits in memory", str(answer))


def test_hybrid_sharding_is_over_less_than_all_replicas() -> None:
    """A plan that does it is compared with the best that shards over all of them, or gathers nothing."""
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
    assert (found.objective, found.peak_memory_bytes) == (hybrid.objective, hybrid.predicted.peak_memory_bytes)


def test_what_is_not_answered_is_said() -> None:
    """An unknown feature; a value that there is not."""
    with pytest.raises(InvalidSpecError, match=r"ask for one of data \(ddp, .*zero-1, zero-2, fsdp \(zero-3"):
        make_plan("dense").why_not("magic")
    with pytest.raises(InvalidSpecError, match="no parameter, input or node of that name; there are input:0"):
        make_plan("dense").explain("sentences.weight")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_limits_are_those_of_planning_with_more(name: str) -> None:
    """Each figure is that of a new plan; what memory is worth follows from them, and no change makes a step longer."""
    sizes = sorted(memory for _, memory, _ in every_recipe(name))
    plan = make_plan(name, memory_budget=sizes[len(sizes) // 20])
    assert plan.memory_budget is not None
    found = plan.limits()
    stated = {item.name.partition(":")[0]: item.objective for item in found.variants}
    more = make_plan(name, memory_budget=int(1.1 * plan.memory_budget))
    assert stated["10 % more memory"] == more.objective
    assert stated["twice the memory"] == make_plan(name, memory_budget=2 * plan.memory_budget).objective
    assert stated["memory without limit"] == make_plan(name).objective
    assert found.memory_worth_s_per_byte == pytest.approx(
        (plan.objective - more.objective) / (0.1 * plan.memory_budget)
    )
    steps = [plan.objective, *(stated[key] for key in ("10 % more memory", "twice the memory", "memory without limit"))]
    assert steps == sorted(steps, reverse=True)
    unit = CLUSTER.device
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
    """More of it changes nothing."""
    found = make_plan("dense").limits()
    assert found.memory_worth_s_per_byte == 0.0
    assert "A GiB more" not in str(found)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dense", "layers.2.wide.weight"), ("dense", "words.weight"), ("sparse", "layers.1.up"), ("dense", "input:0")],
)
def test_every_other_spec_has_the_fastest_recipe_that_gives_it(name: str, value: str) -> None:
    """By pricing all; the chosen one's is the plan's own."""
    plan = make_plan(name)
    assert plan.recipe is not None
    assert plan.memory_budget is not None
    priced = alternatives(plan).priced
    asked = find_value(priced, value)

    def family(recipe: Execution) -> tuple[PartitionSpec, bool]:
        whole = replace(recipe, zero=0, zero_group=None)
        return spec_of(priced, asked, whole), recipe.zero == 3 and value != "input:0"

    best: dict[object, float] = {}
    for time, memory, recipe in every_recipe(name):
        if memory <= plan.memory_budget:
            best[family(recipe)] = min(time, best.get(family(recipe), time))
    found = plan.explain(value)
    chosen = alternatives(plan).problem.base.of(plan.recipe)
    assert (best.pop(family(chosen)), found.chosen.spec) == (plan.objective, spec_of(priced, asked, chosen))
    assert [item.objective for item in found.others] == sorted(best.values())
    assert all(item.recipe is not None and item.recipe.words in str(found) for item in found.others)
    if value in plan.parameters:
        assert found.chosen.spec == plan.parameters[value].spec
        assert found.shape == plan.parameters[value].shape
