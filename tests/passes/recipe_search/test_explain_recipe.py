"""What a recipe does with single values adds up to what it does with all of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoshard import Cluster
from autoshard.errors import InvalidSpecError
from autoshard.ir.execution import Execution
from autoshard.ir.program import InputKind
from cost_models.step import fitted
from passes.recipe_search.explain_recipe import (
    Value,
    find_value,
    spec_families,
    spec_of,
    value_costs,
    value_memory,
)
from passes.recipe_search.recipe_problem import RecipeProblem
from passes.recipe_search.recipe_space import Only
from passes.recipes.pipeline_stages import rank_sections, share_out
from passes.recipes.price_ends import end_work
from passes.recipes.price_recipe import sharded_time
from passes.recipes.recipe_groups import recipe_groups, traffic_time
from passes.recipes.recipe_plan import predict_recipe
from passes.sections.fold_program import AFTER, BEFORE
from passes.sections.price_model import PricedModel, RecipeKind
from tests.passes import decoders

CLUSTER, STEP = Cluster("h100_sxm", 2, 2), fitted()
PRICED = {
    "dense": decoders.priced_dense(4),
    "sparse": decoders.priced_sparse(),
}
PRICED_AND_PLAIN = {**PRICED, "without tokens": decoders.priced_plain()}


@cache
def recipes(name: str) -> list[Execution]:
    """All recipes of a small model."""
    problem = RecipeProblem(PRICED_AND_PLAIN[name].counted, CLUSTER, Execution(global_batch=8), 80e9, least_tokens=8)
    return list(problem.space().recipes())


@st.composite
def models_with_recipes(draw: st.DrawFn) -> tuple[PricedModel, Execution]:
    """A model and one of its recipes."""
    name = draw(st.sampled_from(sorted(PRICED)))
    return PRICED[name], draw(st.sampled_from(recipes(name)))


def parameters(priced: PricedModel) -> list[Value]:
    """Every parameter of the whole model."""
    slots = priced.folded.single.inputs_of(InputKind.PARAMETER)
    return [find_value(priced, name) for slot in slots for name in priced.folded.names_of(slot.name)]


@settings(max_examples=25)
@given(models_with_recipes())
def test_costs_of_parameters_add_up_to_those_of_all_ranks(case: tuple[PricedModel, Execution]) -> None:
    """Reduced, gathered and updated: what each pipeline rank is priced with."""
    priced, recipe = case
    groups, prices = recipe_groups(recipe, CLUSTER), priced.section_prices(recipe, CLUSTER)
    expected: defaultdict[str, float] = defaultdict(float)
    for counts in rank_sections(share_out(priced.folded.blocks, recipe), recipe):
        held = [(prices[name], count) for name, count in counts.items()]
        loads = [
            sum(getattr(price, key) * count for price, count in held) for key in ("parameters", "expert_parameters")
        ]
        tensors = sum(price.tensors * count for price, count in held)
        work = end_work(loads[0], loads[1], tensors, recipe, groups, CLUSTER, STEP)
        expected["optimizer"] += work.update_s
        expected["gradient reduction"] += work.reduce_s
        expected["parameter gathering"] += work.gather_s
        for price, count in held:
            gather_s, again_s = sharded_time(price, recipe, groups, CLUSTER, STEP)
            turns = count * recipe.micro_batches
            expected["parameter gathering, forward and backward"] += 2 * gather_s * turns
            expected["gradient reduction"] += (again_s - gather_s) * turns
    found: defaultdict[str, float] = defaultdict(float)
    for value in parameters(priced):
        for item in value_costs(priced, value, recipe, CLUSTER, STEP):
            found[item.what] += item.time_s
    for what, seconds in expected.items():
        assert found[what] == pytest.approx(seconds), what


@settings(max_examples=25)
@given(models_with_recipes())
def test_memory_of_parameters_adds_up_to_that_of_the_step(case: tuple[PricedModel, Execution]) -> None:
    """On one rank, where there is no pipeline."""
    priced, recipe = case
    assume(recipe.pipeline == 1)
    parts = predict_recipe(priced.counted, recipe, CLUSTER).memory_breakdown
    found: Counter[str] = Counter()
    values = parameters(priced)
    for value in values:
        found.update(value_memory(priced, value, recipe, CLUSTER))
    for name in ("parameters", "gradients", "optimizer state"):
        assert found[name] == pytest.approx(parts[name], abs=len(values))


@settings(max_examples=25)
@given(models_with_recipes())
def test_collectives_of_activations_add_up_to_those_of_a_section(case: tuple[PricedModel, Execution]) -> None:
    """Each belongs to one value; a block that is computed again repeats those of its forward."""
    priced, recipe = case
    groups = recipe_groups(recipe, CLUSTER)
    sections, prices = priced.sections(RecipeKind.of(recipe)), priced.section_prices(recipe, CLUSTER)
    nodes = priced.folded.single.nodes_by_name()
    for name, section in sections.items():
        again = 2 if recipe.recompute == "full" and name not in (BEFORE, AFTER) else 1
        turns = ((prices[name].forward, again), (prices[name].backward, 1))
        expected = sum(
            count * recipe.micro_batches * traffic_time(item, recipe, groups, STEP)
            for phase, count in turns
            for item in phase.traffic
        )
        moved = {item.moved for phase in (section.forward, section.backward) for item in phase.sent}
        costs = [
            item
            for node in moved
            for item in value_costs(priced, Value(node, nodes[node], name), recipe, CLUSTER, STEP)
        ]
        assert sum(item.time_s for item in costs) == pytest.approx(expected)


@settings(max_examples=10)
@pytest.mark.parametrize("name", sorted(PRICED_AND_PLAIN))
@given(data=st.data())
def test_recipes_of_another_spec_are_in_one_family(name: str, data: st.DataObject) -> None:
    """Each other spec is searched for once: in all recipes that give it, and in no other."""
    priced, (recipe, *others) = PRICED_AND_PLAIN[name], data.draw(st.lists(st.sampled_from(recipes(name)), min_size=20))
    value = data.draw(st.sampled_from(parameters(priced)))
    families = spec_families(priced, value, recipe)
    specs: list[set[str]] = [set() for _ in families]
    for other in others:
        places = [place for place, family in enumerate(families) if any(_admits(only, other) for only in family)]
        spec = _unsized(priced, value, other)
        assert len(places) == (spec != _unsized(priced, value, recipe))
        for place in places:
            specs[place].add(spec)
    assert all(len(found) <= 1 for found in specs)


def _admits(only: Only, recipe: Execution) -> bool:
    return all(getattr(recipe, name) in values for name, values in only.items())


def _unsized(priced: PricedModel, value: Value, recipe: Execution) -> str:
    """The spec, with replicas that share a parameter, however many there are."""
    spec = spec_of(priced, value, replace(recipe, zero=0))
    return f"{spec}, shared" if recipe.zero == 3 else str(spec)


def test_a_parameter_has_the_collectives_of_the_calls_that_read_it() -> None:
    """A row of a split product is reduced behind it; a column is not, but the gradient of what it is given is."""
    recipe = Execution(tensor=4, global_batch=4)
    costs = {
        name: [
            item.what
            for item in value_costs(PRICED["dense"], find_value(PRICED["dense"], name), recipe, CLUSTER, STEP)
            if item.axis == "tensor"
        ]
        for name in ("layers.1.wide.weight", "layers.1.narrow.weight")
    }
    (column,), (row,) = costs["layers.1.wide.weight"], costs["layers.1.narrow.weight"]
    assert column.startswith("all-reduce")
    assert column.endswith("backward")
    assert row.startswith("all-reduce")
    assert row.endswith("forward")


def test_names_that_are_none_are_refused() -> None:
    """With some that there are; the nodes among them are answered for, also where `Plan.nodes` has none."""
    with pytest.raises(InvalidSpecError, match=r"explain\('layers.9.wide.weight'\).* there are input:0") as caught:
        find_value(PRICED["dense"], "layers.9.wide.weight")
    named = str(caught.value).split("nodes: ")[1].removesuffix(", ...").split(", ")
    assert len(named) == 8
    assert [find_value(PRICED["dense"], name).node.name for name in named] == named
