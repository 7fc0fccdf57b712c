"""A rank reduces gradients, updates parameters and gathers parameters once per step."""

from __future__ import annotations

from autoshard import Cluster
from autoshard.ir.execution import Execution
from passes.search.price_ends import exchange_times
from passes.search.recipe_groups import recipe_groups
from tests.passes.executions import under


def _cluster(recipe: Execution) -> Cluster:
    return Cluster("h100_sxm", max(1, recipe.devices // 8), min(8, recipe.devices))


def test_nothing_is_exchanged_among_one() -> None:
    """A single replica takes no time to exchange gradients and parameters."""
    recipe = Execution(zero=1)
    groups = recipe_groups(recipe, _cluster(recipe))
    assert exchange_times(1e9, 0.0, recipe, groups) == (0.0, 0.0)


def test_smaller_pieces_take_longer() -> None:
    """Buckets of 1 MB take longer than buckets of 1 GB, because each collective has its latency."""
    few, many = (under(Execution(data=64), bucket_bytes=size) for size in (10**9, 10**6))
    groups = recipe_groups(few, _cluster(few))
    often, seldom = (exchange_times(1e8, 0.0, each, groups)[0] for each in (many, few))
    assert often > seldom


def test_gradients_are_reduced_over_both_axes_of_replicas() -> None:
    """Gradients take as long over 2 data x 8 context ranks as over 16 data ranks, and longer than over 2 or 8."""
    recipes = [Execution(data=2, context=8), Execution(data=16), Execution(data=2), Execution(data=8)]
    both, alone, *fewer = (exchange_times(1e9, 0.0, each, recipe_groups(each, _cluster(each)))[0] for each in recipes)
    assert both == alone
    assert all(both > less for less in fewer)
