"""What plans of joined clusters answer: each figure is that of pricing, or planning, the alternative."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

import autoshard
from autoshard import Cluster, Plan, Recipe
from autoshard.cluster import JoinedCluster
from autoshard.ir.program import InputKind
from autoshard.ir.recipe import RECOMPUTE
from autoshard.ir.spec import PartitionSpec
from cost_models.hardware import Cluster as PricedCluster
from passes.recipe_search.explain_recipe import Value, find_value, spec_of, value_costs, value_memory, value_places
from passes.recipe_search.joined_problem import JoinedProblem
from passes.recipe_search.recipe_alternatives import FEATURES, RecipeAlternatives
from passes.recipes.pipeline_stages import rank_sections, share_out
from passes.recipes.place_islands import place_islands
from passes.recipes.price_ends import end_work
from passes.recipes.price_recipe import sharded_time
from passes.recipes.recipe_groups import traffic_time
from passes.sections.fold_program import AFTER, BEFORE
from passes.sections.price_model import RecipeKind
from tests.passes.decoders import dense, tokens
from tests.passes.islands import slower

MODEL = dense(4)
SMALL = 1_150_000
"""Memory of the second island's device, which binds."""
EVEN = 3_800_000
"""Of both, which binds too."""
JOINED = Cluster.join(Cluster("l4", 1, 1), slower(2.0, SMALL))
OPTIONS = {"optimizer": "adamw", "global_batch": 8, "constraints": {"micro_batch": (1, 2)}}


@cache
def make_plan(cluster: JoinedCluster = JOINED) -> Plan:
    """The fastest recipe of a small model."""
    return autoshard.plan(MODEL, cluster, example_inputs=tokens(), **OPTIONS)


def alternatives() -> RecipeAlternatives:
    """What answers for the plan."""
    found = make_plan().alternatives
    assert isinstance(found, RecipeAlternatives)
    return found


@cache
def every_recipe() -> list[tuple[float, int, Recipe]]:
    """Seconds and bytes of all that are searched and fit."""
    problem = alternatives().problem
    assert isinstance(problem, JoinedProblem)
    found = []
    for route, recompute in product(problem.routes, RECOMPUTE):
        for recipe in problem.space(route, {"recompute": (recompute,)}).recipes():
            size, limit = problem.tightest(recipe)
            if size <= limit:
                found.append((problem.time_s(recipe), problem.fullest_bytes(recipe), recipe))
    return found


def test_the_plan_lies_on_both_islands() -> None:
    """With more blocks on the faster one; it is the fastest of all recipes."""
    plan = make_plan()
    assert plan.recipe is not None
    assert plan.recipe.islands is not None
    assert sorted(plan.recipe.islands) == [0, 1]
    assert plan.objective == min(time for time, _, _ in every_recipe())


@pytest.mark.parametrize("feature", FEATURES)
def test_why_not_states_the_best_recipe_that_does_it(feature: str) -> None:
    """Or, where the plan does it, the best that does not; by pricing all."""
    plan = make_plan()
    assert plan.recipe is not None
    answer, asked = plan.why_not(feature), FEATURES[feature]
    ways = {name: (only,) for name, only in asked.ways.items()}
    if answer.used:
        ways = {f"without {feature}": asked.without}
    stated = {item.name.partition(":")[0]: item for item in answer.variants if item.fits}
    for way, kinds in ways.items():
        costs = [
            (time, size)
            for time, size, recipe in every_recipe()
            if any(all(getattr(recipe, field) in only[field] for field in only) for only in kinds)
        ]
        assert (way in stated) == bool(costs)
        if costs:
            item = stated[way]
            assert (item.objective, item.peak_memory_bytes) == min(costs)
            assert item.step_time_s == item.objective
            assert item.breakdown is not None
            assert sum(item.breakdown.values()) == pytest.approx(min(costs)[0])


def _with_island(place: int, change: Callable[[PricedCluster], PricedCluster]) -> JoinedCluster:
    islands = list(JOINED.islands)
    islands[place] = change(islands[place])
    return JoinedCluster(islands, network=JOINED.network)


def _more_memory(island: PricedCluster) -> PricedCluster:
    unit = island.device
    return PricedCluster(island.node.with_device(replace(unit, memory_bytes=int(1.1 * unit.memory_bytes))), 1, 1)


def _faster_products(island: PricedCluster) -> PricedCluster:
    peaks = {dtype: 1.1 * peak for dtype, peak in island.device.peak_flops.items()}
    return PricedCluster(island.node.with_device(replace(island.device, peak_flops=peaks)), 1, 1)


def _faster_network(island: PricedCluster) -> PricedCluster:
    assert island.node.inter is not None
    return PricedCluster(replace(island.node, inter=island.node.inter.scaled(1.1)), 1, 1)


def test_limits_are_those_of_planning_with_more() -> None:
    """Of one island, of all; more of nothing makes a step longer, and what binds is named."""
    plan, found = make_plan(), make_plan().limits()
    stated = {item.name.partition(": ")[0]: item for item in found.variants}
    names = [island.name for island in JOINED.islands]
    for what, change in (
        ("10 % more memory", _more_memory),
        ("10 % faster matrix products", _faster_products),
        ("10 % faster network", _faster_network),
    ):
        for place, name in enumerate(names):
            again, item = make_plan(_with_island(place, change)), stated[f"{what} on island {place} ({name})"]
            assert (item.objective, item.step_time_s) == (again.objective, again.predicted.step_time_s)
    assert all(item.objective is not None and item.objective <= plan.objective for item in found.variants)
    both = JoinedCluster(tuple(_more_memory(island) for island in JOINED.islands))
    assert stated["10 % more memory"].objective == make_plan(both).objective < plan.objective
    assert found.memory_worth_s_per_byte is None
    assert found.binding
    assert found.binding in str(found)


def test_a_byte_more_on_every_device_has_a_worth() -> None:
    """Where all have the same limit."""
    plan = autoshard.plan(MODEL, JOINED, example_inputs=tokens(), memory_budget=EVEN, **OPTIONS)
    more = autoshard.plan(MODEL, JOINED, example_inputs=tokens(), memory_budget=int(1.1 * EVEN), **OPTIONS)
    worth = plan.limits().memory_worth_s_per_byte
    assert worth == pytest.approx((plan.objective - more.objective) / (0.1 * EVEN))


@pytest.mark.parametrize("name", ["layers.0.wide.weight", "layers.3.wide.weight", "words.weight", "input:0"])
def test_every_other_spec_has_the_fastest_recipe_that_gives_it(name: str) -> None:
    """By pricing all; the chosen one's is the plan's own."""
    plan, priced = make_plan(), alternatives().priced
    assert plan.recipe is not None
    asked = find_value(priced, name)

    def family(recipe: Recipe) -> tuple[PartitionSpec, bool]:
        whole = replace(recipe, zero=0, zero_group=None)
        return spec_of(priced, asked, whole), recipe.zero == 3 and name != "input:0"

    best: dict[object, float] = {}
    for time, _, recipe in every_recipe():
        best[family(recipe)] = min(time, best.get(family(recipe), time))
    found = plan.explain(name)
    own = best.pop(family(plan.recipe))
    assert (own, found.chosen.spec) == (plan.objective, spec_of(priced, asked, plan.recipe))
    assert [item.objective for item in found.others if item.fits] == sorted(best.values())
    assert plan.recipe.islands is not None
    assert all(item.island in plan.recipe.islands for item in found.costs)


PLACED = JoinedCluster([Cluster("h100_sxm", 1, 4), Cluster("a100_sxm_80gb", 2, 2)])
RECIPES = [
    Recipe(data=4, pipeline=2, islands=(1, 0), stage_blocks=(1, 3), global_batch=8),
    Recipe(data=2, tensor=2, pipeline=2, islands=(0, 1), zero=1, stage_blocks=(3, 1), global_batch=8),
    Recipe(data=2, pipeline=4, islands=(1, 0), zero=3, recompute="full", global_batch=8, split_ends=True),
    Recipe(data=4, pipeline=2, islands=(0, 1), zero=2, schedule="zbv", virtual_stages=2, global_batch=16),
    Recipe(data=2, tensor=2, sequence_parallel=True, islands=(1,), zero=1, global_batch=8),
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"zero-{recipe.zero}, {recipe.pipeline} ranks")
def test_costs_of_parameters_add_up_to_those_of_all_ranks(recipe: Recipe) -> None:
    """Each rank's on its own island."""
    priced, model = alternatives().priced, alternatives().problem.model
    placement = place_islands(recipe, PLACED)
    expected: defaultdict[tuple[str, int], float] = defaultdict(float)
    assert recipe.islands is not None
    held = rank_sections(share_out(priced.folded.blocks, recipe), recipe)
    for number, counts in zip(placement.of_ranks, held, strict=True):
        island, place = placement.islands[number], recipe.islands[number]
        prices = priced.section_prices(recipe, island.cluster)
        dense_elements = sum(prices[name].parameters * count for name, count in counts.items())
        tensors = sum(prices[name].tensors * count for name, count in counts.items())
        work = end_work(dense_elements, 0.0, tensors, recipe, island.groups, island.cluster, model)
        expected["optimizer", place] += work.update_s
        expected["gradient reduction", place] += work.reduce_s
        expected["parameter gathering", place] += work.gather_s
        for name, count in counts.items():
            gather_s, again_s = sharded_time(prices[name], recipe, island.groups, island.cluster, model)
            turns = count * recipe.micro_batches
            expected["parameter gathering, forward and backward", place] += 2 * gather_s * turns
            expected["gradient reduction", place] += (again_s - gather_s) * turns
    found: defaultdict[tuple[str, int | None], float] = defaultdict(float)
    slots = priced.folded.single.inputs_of(InputKind.PARAMETER)
    for value in (find_value(priced, name) for slot in slots for name in priced.folded.names_of(slot.name)):
        assert set(value_memory(priced, value, recipe, PLACED)) <= {"parameters", "gradients", "optimizer state"}
        for item in value_costs(priced, value, recipe, PLACED, model):
            found[item.what, item.island] += item.time_s
    for what, seconds in expected.items():
        assert found[what] == pytest.approx(seconds), what


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"zero-{recipe.zero}, {recipe.pipeline} ranks")
def test_collectives_of_activations_are_those_of_each_island(recipe: Recipe) -> None:
    """Of a block on every island that has one, of the ends on theirs."""
    priced, model = alternatives().priced, alternatives().problem.model
    nodes, sections = priced.folded.single.nodes_by_name(), priced.sections(RecipeKind.of(recipe))
    again = 2 if recipe.recompute == "full" else 1
    for name, section in sections.items():
        moved = {item.moved for phase in (section.forward, section.backward) for item in phase.sent}
        costs = [
            item
            for node in moved
            for item in value_costs(priced, Value(node, nodes[node], name), recipe, PLACED, model)
        ]
        places = value_places(priced, Value("", nodes[next(iter(nodes))], name), recipe, PLACED)
        if name in (BEFORE, AFTER):
            assert recipe.islands is not None
            assert len(places) == 1
        for place in places:
            price = priced.section_prices(recipe, place.cluster)[name]
            turns = ((price.forward, again if name not in (BEFORE, AFTER) else 1), (price.backward, 1))
            seconds = sum(
                count * recipe.micro_batches * traffic_time(item, recipe, place.groups, model)
                for phase, count in turns
                for item in phase.traffic
            )
            assert sum(item.time_s for item in costs if item.island == place.island) == pytest.approx(seconds)


def test_plans_are_compared() -> None:
    """Of the joined cluster and of an island alone; the figures are those of pricing both."""
    plan = make_plan()
    alone = autoshard.plan(MODEL, JOINED, example_inputs=tokens(), **{**OPTIONS, "constraints": {"islands": (0,)}})
    found = plan.compare(alone)
    assert found.recipe_fields["islands"] == (plan.recipe and plan.recipe.islands, (0,))
    for index, each in enumerate((plan, alone)):
        assert each.recipe is not None
        again = autoshard.price(MODEL, JOINED, each.recipe, example_inputs=tokens()).predicted
        assert found.step_time_s[index] == again.step_time_s
        assert found.peak_memory_bytes[index] == again.peak_memory_bytes
        assert {part: pair[index] for part, pair in found.breakdown.items() if pair[index]} == {
            part: seconds for part, seconds in again.breakdown.items() if seconds
        }
    assert "recipe: islands" in str(found)
