"""What a rank does once per step: it reduces gradients, updates parameters, and gathers them."""

from __future__ import annotations

from autoshard import Cluster
from autoshard.ir.execution import Execution
from cost_models.step import StepModel
from passes.recipes.own_runtime import own_runtime
from passes.recipes.price_ends import RankLoad, end_times, exchange_times
from passes.recipes.recipe_groups import pieces, recipe_groups
from tests.passes.executions import under

MODEL = StepModel()


def _cluster(recipe: Execution) -> Cluster:
    return Cluster("h100_sxm", max(1, recipe.devices // 8), min(8, recipe.devices))


def test_nothing_is_exchanged_among_one() -> None:
    """One replica has nothing to reduce or to gather."""
    recipe = Execution(zero=1)
    groups = recipe_groups(recipe, _cluster(recipe))
    assert exchange_times(1e9, 0.0, recipe, groups, _cluster(recipe), MODEL) == (0.0, 0.0)


def test_smaller_pieces_take_longer() -> None:
    """Each collective has its own latency."""
    few, many = (under(Execution(data=64), bucket_bytes=size) for size in (10**9, 10**6))
    groups = recipe_groups(few, _cluster(few))
    assert pieces(10**9, many, 8) == 1000
    often, seldom = (exchange_times(1e8, 0.0, each, groups, _cluster(few), MODEL)[0] for each in (many, few))
    assert often > seldom


def test_gradients_are_reduced_over_both_axes_of_replicas() -> None:
    """Data and context, 2 x 8, are 16 replicas: as long as 16 of data, longer than 2, and than 8."""
    recipes = [Execution(data=2, context=8), Execution(data=16), Execution(data=2), Execution(data=8)]
    both, alone, *fewer = (
        exchange_times(1e9, 0.0, each, recipe_groups(each, _cluster(each)), _cluster(each), MODEL)[0]
        for each in recipes
    )
    assert both == alone
    assert all(both > less for less in fewer)


def test_nothing_hides_the_gradients_that_are_made_last() -> None:
    """All others are reduced beside the backward."""
    recipe = Execution(runtime=own_runtime(Cluster("h100_sxm", 1, 8)), data=8)
    groups, cluster = recipe_groups(recipe, _cluster(recipe)), _cluster(recipe)
    loads = [RankLoad(1e8, 0.0, 10, 1.0, 2.0, last=last) for last in (0.0, 5e7, 1e8)]
    none, half, all_s = (end_times(each, recipe, groups, cluster, StepModel())["gradient reduction"] for each in loads)
    assert all_s == exchange_times(1e8, 0.0, recipe, groups, cluster, MODEL)[0]
    assert none < half == (none + all_s) / 2
