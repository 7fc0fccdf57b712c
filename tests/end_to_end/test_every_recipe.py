"""The search over recipes finds the best recipe of a full enumeration.

The cases vary the sizes of stages, schedules, memory limits and recomputation. Models are drawn as lists of blocks of
two small decoders. Clusters are drawn as nodes of several kinds with random networks and memory.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import Cluster
from autoshard.ir.execution import Execution
from cost_models.device import HostLink
from cost_models.hardware import node_type
from passes.driver.pricing import price_execution, priced_model
from passes.search.layers.price_model import CountedModel
from passes.search.recipe_problem import RecipeProblem
from tests.passes.decoders import dense, priced_sparse, tokens
from tests.passes.every_recipe import every_price
from tests.passes.search.problems import RUNTIMES, recipe_problem

LEAST_TOKENS = 16
FAST_HOST = HostLink(1e13, 1e13)
"""A nearly free link to the host, which makes recipes with offloading fastest in little memory."""
SMALL_HOST = 300_000
"""Host memory smaller than the offloaded bytes of some recipes, in bytes."""


@st.composite
def models(draw: st.DrawFn, most: int) -> CountedModel:
    """Draw a model of up to `most` blocks, each dense or with experts."""
    sparse = priced_sparse().counted
    dense_block, experts_block = dict.fromkeys(sparse.blocks)
    blocks = draw(st.lists(st.sampled_from([dense_block, experts_block]), min_size=1, max_size=most))
    return CountedModel(tuple(blocks), sparse.tokens, sparse.count, experts_block in blocks)


@st.composite
def clusters(draw: st.DrawFn, most: int) -> Cluster:
    """Draw a few devices of one kind, a fast or slow network, and a host of any size, with or without a link."""
    shapes = [(nodes, each) for nodes in range(1, most + 1) for each in range(1, most + 1) if 2 <= nodes * each <= most]
    node = node_type(draw(st.sampled_from(["h100_sxm", "a100_sxm_80gb", "a100_pcie_40gb", "l4"])))
    nodes, each = draw(st.sampled_from([(n, e) for n, e in shapes if e <= node.devices_per_node]))
    if node.inter is not None:
        node = node.with_network(bytes_per_s_per_device=draw(st.sampled_from([1e8, 1e10])))
    host_link = draw(st.sampled_from([node.device.host_link, FAST_HOST, None]))
    node = replace(
        node.with_device(replace(node.device, host_link=host_link)),
        host_memory_bytes=draw(st.sampled_from([SMALL_HOST, 10**9, None])),
    )
    return Cluster(node, nodes, each)


BASES = st.builds(Execution, global_batch=st.sampled_from([2, 4]), runtime=RUNTIMES)


def check(counted: CountedModel, cluster: Cluster, base: Execution, share: float) -> None:
    """Check that the search finds the fastest recipe of all that fit a drawn memory limit, and proves it.

    `share` picks the limit among the memory needs of all recipes. Below the smallest need, the search finds no recipe.
    """
    prices = every_price(counted, cluster, base, LEAST_TOKENS)
    sizes = sorted({each.memory_bytes for each in prices})
    limit = sizes[round(share * (len(sizes) - 1))]
    best = min(each.time_s for each in prices if each.memory_bytes <= limit)
    device = replace(cluster.node.device, memory_bytes=limit)
    small = Cluster(cluster.node.with_device(device), cluster.nodes, cluster.devices_per_node)
    groups = {"zero_group": (None, *range(2, cluster.size))}  # otherwise the search thins them out
    problem = RecipeProblem(counted, small, base, limit, LEAST_TOKENS, pinned=groups)
    found = problem.best()
    assert found.recipe is not None
    assert found.objective == found.lower_bound == best == problem.pricer.time_s(found.recipe)
    assert problem.pricer.memory_bytes(found.recipe) <= limit
    assert found.is_complete
    assert problem.smallest().objective == sizes[0]
    assert replace(problem, memory_limit=sizes[0] - 1).best().recipe is None


@settings(max_examples=3)
@given(models(most=3), clusters(most=3), BASES, st.floats(0, 1))
def test_it_finds_what_pricing_every_recipe_finds(
    counted: CountedModel, cluster: Cluster, base: Execution, share: float
) -> None:
    """The search finds exactly the fastest recipe's time, within memory, for up to three devices and blocks."""
    check(counted, cluster, base, share)


@pytest.mark.slow
@settings(max_examples=30)
@given(models(most=5), clusters(most=4), BASES, st.floats(0, 1))
def test_it_finds_what_pricing_every_recipe_of_more_devices_finds(
    counted: CountedModel, cluster: Cluster, base: Execution, share: float
) -> None:
    """The search finds the fastest recipe's time for up to four devices and five blocks, of up to 20,000 recipes."""
    check(counted, cluster, base, share)


@settings(max_examples=5)
@given(models(most=4), clusters(most=4), BASES, st.lists(st.floats(0.5, 2), min_size=2, max_size=5))
def test_a_step_is_never_slower_with_more_memory(
    counted: CountedModel, cluster: Cluster, base: Execution, shares: list[float]
) -> None:
    """With more memory a step is never slower, found recipes fit, and below the least memory none is found."""
    problem = RecipeProblem(counted, cluster, base, math.inf, LEAST_TOKENS)
    least, fastest = problem.smallest().objective, problem.best()
    assert fastest.recipe is not None
    limits = sorted([least, *(share * least for share in shares), problem.pricer.memory_bytes(fastest.recipe)])
    found = [problem.within(limit).best() for limit in limits]
    assert [each.recipe is None for each in found] == [limit < least for limit in limits]
    assert all(each.lower_bound == each.objective for each in found)
    steps = [each.objective for each in found]
    assert steps == sorted(steps, reverse=True)
    assert found[limits.index(problem.pricer.memory_bytes(fastest.recipe))].objective == fastest.objective
    fitting = [(each.recipe, limit) for each, limit in zip(found, limits, strict=True) if each.recipe is not None]
    assert all(problem.pricer.memory_bytes(recipe) <= limit for recipe, limit in fitting)


def test_plan_finds_what_price_says_is_best() -> None:
    """The search finds the fastest recipe that fits, among all recipes that `price` prices on two devices."""
    model, base = dense(2), Execution(global_batch=2)
    cluster = Cluster("a100_sxm_80gb", 1, 2)
    counted = priced_model(model, tokens(), None).counted
    recipes = [each.recipe for each in every_price(counted, cluster, base, LEAST_TOKENS)]
    prices = [price_execution(model, cluster, each, tokens()).predicted for each in recipes]
    limit = sorted(each.peak_memory_bytes for each in prices)[len(prices) // 2]
    best = min(each.step_time_s for each in prices if each.peak_memory_bytes <= limit)
    problem = recipe_problem(model, cluster, base, example_inputs=tokens(), memory_limit=limit)
    found = replace(problem, least_tokens=LEAST_TOKENS).best().recipe
    assert found is not None
    priced = price_execution(model, cluster, found, tokens()).predicted
    assert (priced.step_time_s, priced.peak_memory_bytes <= limit) == (best, True)
