"""Plans of recipes on joined clusters, through the public calls."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import autoshard
from autoshard import Cluster, DoesNotFitError, NotAvailableError, Plan, Recipe, RecipeError
from autoshard.cluster import JoinedCluster
from cost_models.hardware import Cluster as PricedCluster
from cost_models.hardware import node_type
from passes.recipe_search.joined_problem import JoinedProblem
from passes.recipe_search.recipe_space import Only, RecipeSpace
from passes.recipe_search.search_recipes import FoundRecipe
from tests.passes.decoders import PRICED, dense, priced_dense, tokens
from tests.passes.islands import JOINED, THREE, slower

MODEL = dense(6)
COUNTED = priced_dense(4).counted


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The plan of a decoder of six blocks on a device and one that is half as fast, one sequence after the other."""
    options = {"optimizer": "adamw", "global_batch": 32, "constraints": {"micro_batch": 1}}
    return autoshard.plan(MODEL, JOINED, example_inputs=tokens(), **options)


def test_the_faster_island_has_more_blocks(plan: Plan) -> None:
    """And both are faster than either alone, with a proof."""
    assert plan.recipe is not None
    assert plan.recipe.islands is not None
    assert len(plan.recipe.islands) == 2
    assert plan.recipe.stage_blocks is not None
    by_island = dict(zip(plan.recipe.islands, plan.recipe.stage_blocks, strict=True))
    assert by_island[0] > by_island[1] > 0
    assert plan.gap == 0.0
    assert plan.baselines.keys() == {"island 0 (l4:1x1) alone", "island 1 (slow 2:1x1) alone"}
    assert all(each is not None and plan.objective < each for each in plan.baselines.values())


def test_its_plan_is_printed_saved_and_priced(plan: Plan, tmp_path: Path) -> None:
    """All by the same figures."""
    assert plan.recipe is not None
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.recipe == plan.recipe
    assert "priced for l4:1x1+slow 2:1x1" in str(plan)
    assert "islands " in plan.recipe.words
    priced = autoshard.price(MODEL, JOINED, plan.recipe, example_inputs=tokens())
    assert priced.predicted.step_time_s == plan.objective
    assert plan.memory_budget == node_type("l4").device.memory_bytes


def test_why_not_searches_all_islands(plan: Plan) -> None:
    """Without a pipeline one island does all."""
    found = plan.why_not("pipeline")
    assert [item.name.split(":")[0] for item in found.variants] == ["without pipeline"]
    assert found.variants[0].objective == min(each for each in plan.baselines.values() if each is not None)


def test_a_constraint_names_the_islands() -> None:
    """In their order; the others are idle."""
    options = {"example_inputs": tokens(), "optimizer": "adamw", "global_batch": 8}
    found = autoshard.plan(MODEL, JOINED, constraints={"islands": (1,)}, **options)
    alone = autoshard.plan(MODEL, JOINED.islands[1], runtime=PRICED, **options)
    assert found.recipe is not None
    assert found.recipe.islands == (1,)
    assert found.objective == alone.objective
    with pytest.raises(RecipeError, match="no joined cluster"):
        autoshard.plan(MODEL, JOINED.islands[0], constraints={"islands": (0,)}, **options)


def test_islands_of_one_name_are_all_searched() -> None:
    """They differ in their networks; the faster one is the second."""
    kind = node_type("h100_sxm")
    slow, fast = (Cluster(kind.with_network(bytes_per_s_per_device=speed), 2, 1) for speed in (1e8, 2e10))
    joined = Cluster.join(slow, fast)
    found = autoshard.plan(MODEL, joined, example_inputs=tokens(), optimizer="adamw", global_batch=4)
    alone = autoshard.plan(MODEL, fast, example_inputs=tokens(), optimizer="adamw", runtime=PRICED, global_batch=4)
    assert len(found.baselines) == 2
    assert found.objective <= alone.objective


def test_an_island_alone_is_a_baseline_where_a_recipe_lies_on_it() -> None:
    """One that has too few devices for the constraints is left out; one that has too little memory does not fit."""
    options = {"example_inputs": tokens(), "optimizer": "adamw", "global_batch": 8}
    several = Cluster.join(Cluster("l4", nodes=1, devices_per_node=2), slower(2.0))
    found = autoshard.plan(MODEL, several, constraints={"pipeline": 2}, **options)
    assert found.baselines.keys() == {"island 0 (l4:1x2) alone"}
    assert autoshard.plan(MODEL, JOINED, constraints={"pipeline": 2}, **options).baselines == {}
    small = Cluster.join(Cluster("l4", 1, 1), slower(2.0, memory_bytes=1000))
    found = autoshard.plan(MODEL, small, **options)
    assert found.baselines["island 1 (slow 2:1x1) alone"] is None
    assert "does not fit" in str(found)


def test_what_fits_nowhere_is_an_error() -> None:
    """With the least memory of the fullest device, and how many nodes would do: with those it fits."""
    options = {"optimizer": "adamw", "global_batch": 8, "constraints": {"context": 1}}
    with pytest.raises(DoesNotFitError, match="the smallest needs") as raised:
        autoshard.plan(MODEL, JOINED, example_inputs=tokens(), memory_budget=1000, **options)
    least = raised.value.smallest_bytes
    fitting = autoshard.plan(MODEL, JOINED, example_inputs=tokens(), memory_budget=least, **options)
    assert fitting.predicted.peak_memory_bytes <= least
    with pytest.raises(DoesNotFitError, match="2 times as many nodes on each island would do"):
        autoshard.plan(MODEL, JOINED, example_inputs=tokens(), memory_budget=least - 1, **options)
    twice = JoinedCluster([PricedCluster(island.node, 2, 1) for island in JOINED.islands])
    more = autoshard.plan(MODEL, twice, example_inputs=tokens(), memory_budget=least - 1, **options)
    assert more.predicted.peak_memory_bytes < least


def problem(cluster: JoinedCluster = JOINED) -> JoinedProblem:
    """The search for a step of eight sequences, one or two in a micro-batch."""
    limits = tuple(float(island.device.memory_bytes) for island in cluster.islands)
    return JoinedProblem(COUNTED, cluster, Recipe(global_batch=8), limits, pinned={"micro_batch": (1, 2)})


def test_three_islands_are_no_slower_than_two() -> None:
    """Each of them, with all their orders."""
    whole, kinds = problem(THREE).best_of_all()
    assert whole.is_complete
    assert len(kinds) == 3
    assert whole.objective == whole.lower_bound == problem(THREE).best().objective
    assert len(problem(THREE).routes) == 15
    for places in combinations(range(3), 2):
        two = problem(JoinedCluster([THREE.islands[place] for place in places]))
        assert whole.objective <= two.best().objective


def test_what_is_told_meanwhile_holds() -> None:
    """No bound is above the best recipe of all islands, whichever is searched; the best so far is no faster."""
    told: list[FoundRecipe] = []
    whole, kinds = problem().best_of_all(watch=told.append)
    assert whole.objective < min(each.objective for each in kinds.values())
    assert all(each.lower_bound <= whole.objective <= each.objective for each in told)
    assert told[-1].objective == whole.objective


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_ctrl_c_keeps_the_best_recipe(share: float) -> None:
    """Among the islands alone, or among choices of both; with a bound of all."""
    told: list[FoundRecipe] = []
    whole, _ = problem().best_of_all(watch=told.append)
    left = 1 + round(share * (sum(each.recipe is not None for each in told) - 1))

    def watch(found: FoundRecipe) -> None:
        nonlocal left
        left -= found.recipe is not None
        if left == 0:
            raise KeyboardInterrupt

    stopped, _ = problem().best_of_all(watch=watch)
    assert stopped.recipe is not None
    assert stopped.was_interrupted
    assert not stopped.is_complete
    assert stopped.lower_bound <= whole.objective <= stopped.objective
    assert stopped.objective == problem().time_s(stopped.recipe)


def test_ctrl_c_before_any_recipe_ends_the_search() -> None:
    """There is nothing to keep."""

    class Stopped(JoinedProblem):
        def space(self, route: tuple[int, ...], only: Only | None = None) -> RecipeSpace:
            raise KeyboardInterrupt

    whole = problem()
    with pytest.raises(KeyboardInterrupt):
        Stopped(COUNTED, whole.cluster, whole.base, whole.memory_limits).best_of_all()


def test_a_search_that_ends_early_has_a_bound() -> None:
    """With the recipe that was known, or none."""
    nothing, _ = problem().best_of_all(time_budget_s=0.0)
    assert (nothing.recipe, nothing.is_complete, nothing.lower_bound) == (None, False, 0.0)
    known = Recipe(global_batch=8, islands=(1,))
    early = problem().best(known=known, time_budget_s=0.0)
    assert (early.recipe, early.objective) == (known, problem().time_s(known))
    assert early.lower_bound <= problem().best().objective
    with pytest.raises(NotAvailableError, match="ended before any recipe was priced"):
        autoshard.plan(
            MODEL, JOINED, example_inputs=tokens(), optimizer="adamw", global_batch=4, time_budget_s=0.0
        )  # fmt: skip


def test_a_known_recipe_of_another_cluster_is_where_a_search_begins() -> None:
    """The same recipe is found, with fewer sets of recipes looked at."""
    found = problem().best()
    slower_network = JoinedCluster(JOINED.islands, network="infiniband_hdr200")
    again, warm = problem(slower_network).best(), problem(slower_network).best(known=found.recipe)
    assert (again.recipe, again.objective) == (warm.recipe, warm.objective)
    assert warm.nodes <= again.nodes


def test_the_bar_shows_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error."""
    options = {"example_inputs": tokens(), "optimizer": "adamw", "global_batch": 4, "progress": True}
    found = autoshard.plan(MODEL, JOINED, **options)
    assert found.gap == 0.0
    assert "at least" in capsys.readouterr().err


def test_specs_are_planned_on_one_kind_of_device() -> None:
    """`plan` without a batch, and `compile`: the error says what to pass."""
    with pytest.raises(NotAvailableError, match="a mesh lies on devices of one kind"):
        autoshard.plan(MODEL, JOINED, example_inputs=tokens())
    model, cluster = torch.nn.Linear(4, 4), cast("Any", JOINED)
    with pytest.raises(NotAvailableError, match="a mesh lies on devices of one kind"):
        autoshard.compile(model, cluster, example_inputs=(torch.ones(2, 4),))


def test_islands_are_those_of_joined_clusters() -> None:
    """The error names the cluster."""
    recipe = Recipe(islands=(0,))
    with pytest.raises(RecipeError, match="l4:1x1 is no joined cluster"):
        autoshard.price(MODEL, JOINED.islands[0], recipe, example_inputs=tokens())
