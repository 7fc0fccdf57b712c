"""On joined clusters the search finds what pricing every recipe finds: islands, their order, blocks, memory of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from autoshard import Cluster, Recipe, RecipeError
from autoshard.ir.recipe import RECOMPUTE
from cost_models.hardware import Cluster as PricedCluster
from cost_models.joined import JoinedCluster
from passes.recipe_search.joined_problem import JoinedProblem
from passes.recipe_search.recipe_space import Only
from passes.recipes.recipe_plan import predict_recipe
from passes.sections.price_model import CountedModel
from tests.end_to_end.test_every_recipe import BASES, EXPERTS_BLOCK, LEAST_TOKENS, SPARSE, clusters, models
from tests.passes.every_placed_recipe import every_placed_price
from tests.passes.every_recipe import every_recipe
from tests.passes.islands import THREE

VALUES: Mapping[str, tuple[object, ...]] = {
    "recompute": RECOMPUTE, "offload": ("none", "activations"), "zero": (0, 1, 2, 3), "micro_batch": (1, 2),
}  # fmt: skip
"""Fields that multiply all others, and their values."""


@st.composite
def joined_clusters(draw: st.DrawFn, most: int) -> JoinedCluster:
    """Two islands that differ."""
    first, second = draw(clusters(most=most)), draw(clusters(most=most))
    network = "infiniband_ndr400" if None in (first.node.inter, second.node.inter) else None
    joined = JoinedCluster([first, second], network=network)
    return joined if joined.uniform is None else JoinedCluster([first, _twin(second)], network=network)


def _twin(cluster: PricedCluster) -> PricedCluster:
    """The same under another name, so that it stays an island of its own."""
    node = replace(cluster.node, name=f"{cluster.node.name} twin")
    return PricedCluster(node, cluster.nodes, cluster.devices_per_node)


@st.composite
def slices(draw: st.DrawFn) -> Only:
    """Recipes with one value of each such field but one: few enough to price each."""
    free = draw(st.sampled_from(list(VALUES)))
    return {name: (draw(st.sampled_from(values)),) for name, values in VALUES.items() if name != free}


def check(counted: CountedModel, cluster: JoinedCluster, base: Recipe, share: float, only: Only) -> None:
    """Compare the search with every price, with memory of each island that a drawn recipe needs at least."""
    prices = list(every_placed_price(counted, cluster, base, LEAST_TOKENS, only))
    assume(prices)
    some = prices[round(share * (len(prices) - 1))].memory_bytes
    limits = tuple(size or max(some) for size in some)

    def fits(sizes: tuple[int, ...]) -> bool:
        return all(size <= limit for size, limit in zip(sizes, limits, strict=True))

    best = min(each.time_s for each in prices if fits(each.memory_bytes))
    problem = JoinedProblem(counted, cluster, base, limits, LEAST_TOKENS, pinned=only)
    found = problem.best()
    assert found.recipe is not None
    assert found.is_complete
    assert found.objective == found.lower_bound == best == problem.time_s(found.recipe)
    assert best == predict_recipe(counted, found.recipe, cluster).step_time_s
    assert any(each.time_s == best and fits(each.memory_bytes) for each in prices)
    several = [each for each in prices if each.recipe.pipeline > 1 and all(each.memory_bytes)]
    on_all = problem.best(routes=[route for route in problem.routes if len(route) == len(cluster.islands)])
    assert on_all.objective == min((each.time_s for each in several if fits(each.memory_bytes)), default=math.inf)
    fullest = min(max(size / limit for size, limit in zip(each.memory_bytes, limits, strict=True)) for each in prices)
    smallest = problem.smallest()
    assert smallest.recipe is not None
    size, limit = problem.tightest(smallest.recipe)
    assert (size, size / limit) == (smallest.objective, fullest)


@settings(max_examples=2)
@given(models(most=3), joined_clusters(most=2), BASES, st.floats(0, 1), slices())
def test_it_finds_what_pricing_every_recipe_finds(
    counted: CountedModel, cluster: JoinedCluster, base: Recipe, share: float, only: Only
) -> None:
    """Time to the last digit, within the memory of each island, with a proof; and the least memory."""
    check(counted, cluster, base, share, only)


@pytest.mark.slow
@example(
    CountedModel((EXPERTS_BLOCK,), SPARSE.tokens, SPARSE.count, has_experts=True),
    JoinedCluster([Cluster("h100_sxm", 1, 2), Cluster("h100_sxm", 1, 4)]),
    Recipe(global_batch=2), 0.5, {"offload": ("none",), "zero": (1,), "micro_batch": (2,)},
)  # tensor ranks split nothing  # fmt: skip
@settings(max_examples=20)
@given(models(most=5), joined_clusters(most=4), BASES, st.floats(0, 1), slices())
def test_it_finds_what_pricing_every_recipe_of_more_devices_finds(
    counted: CountedModel, cluster: JoinedCluster, base: Recipe, share: float, only: Only
) -> None:
    """Up to eight devices and five blocks."""
    check(counted, cluster, base, share, only)


@settings(max_examples=2)
@given(models(most=3), BASES, st.floats(0, 1), slices())
def test_it_finds_what_pricing_every_recipe_of_three_islands_finds(
    counted: CountedModel, base: Recipe, share: float, only: Only
) -> None:
    """All 15 choices."""
    check(counted, THREE, base, share, only)


@settings(max_examples=3)
@given(models(most=3), BASES, st.sampled_from(["h100_sxm", "a100_sxm_80gb", "l4"]))
def test_like_islands_price_as_one_cluster(counted: CountedModel, base: Recipe, name: str) -> None:
    """With a device in each node, every recipe whose stages fill islands has the price of the uniform cluster."""
    whole, half = Cluster(name, 4, 1), Cluster(name, 2, 1)
    joined = JoinedCluster([half, _twin(half)])
    known = every_recipe(counted, whole, base, LEAST_TOKENS)
    recipes = [each for each in known if each.pipeline in (2, 4)]
    for recipe in recipes[:: max(1, len(recipes) // 40)]:
        try:
            uniform = predict_recipe(counted, recipe, whole)
        except RecipeError:
            continue
        placed = predict_recipe(counted, recipe, joined)
        assert placed.step_time_s == pytest.approx(uniform.step_time_s, rel=1e-12)
        assert placed.memory_breakdown == uniform.memory_breakdown


def test_like_islands_on_their_own_network_are_one_cluster() -> None:
    """Whatever is planned for them is planned for that."""
    joined = Cluster.join(Cluster("h100_sxm", 2, 4), Cluster("h100_sxm", 3, 4))
    assert joined.uniform == PricedCluster("h100_sxm", 5, 4)
