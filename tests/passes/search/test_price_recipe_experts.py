"""The predicted time and memory of experts, and of the dispatch of tokens to experts."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from autoshard import Cluster
from autoshard.ir.execution import Execution
from passes.search.layers.price_layers import AxisTraffic
from passes.search.layers.price_model import PricedModel
from passes.search.layers.propagate_axis import MoveKind
from passes.search.pipeline_stages import cut_into_stages
from passes.search.price_memory import memory_price
from passes.search.price_recipe import Step, sharded_time
from passes.search.recipe_groups import recipe_groups, sorting_time, traffic_time
from passes.search.recipe_plan import predict_recipe
from tests.benchmarks.experts import Experts, MixtureOfExperts
from tests.passes.decoders import Decoder, folded, priced_sparse
from tests.passes.executions import under

RECIPE = Execution(data=4, expert=4, micro_batch=4096)
CLUSTER = Cluster("h100_sxm", 1, 4)


class Beside(nn.Module):
    """A module with a residual connection around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def _seconds(recipe: Execution) -> float:
    prices = priced_sparse().counted.layer_prices(recipe, CLUSTER)
    stages = cut_into_stages(priced_sparse().folded.blocks, recipe)
    return Step(prices, stages, recipe, recipe_groups(recipe, CLUSTER), CLUSTER).time_s


def _exchanges(recipe: Execution) -> list[AxisTraffic]:
    prices = priced_sparse().counted.layer_prices(recipe, CLUSTER).values()
    phases = (phase for price in prices for phase in (price.forward, price.backward))
    return [item for phase in phases for item in phase.traffic if item.axis == "expert"]


def test_tokens_count_once_for_each_of_their_experts() -> None:
    """With two experts per token, exchanges over the expert axis hold each token twice."""
    assert {item.copies for item in _exchanges(RECIPE)} == {2.0}


def test_experts_that_are_sharded_are_gathered() -> None:
    """ZeRO-3 gathers and reduces experts over the ranks that have the same experts, two blocks at a time.

    If each expert is on one rank only, there is nothing to gather.
    """
    recipe = Execution(data=4, expert=2, zero=3)
    groups = recipe_groups(recipe, CLUSTER)
    prices = priced_sparse().counted.layer_prices(recipe, CLUSTER)
    moe = max(prices.values(), key=lambda price: price.expert_parameters)
    dense = dataclasses.replace(moe, expert_parameters=0)
    with_experts, without = (sharded_time(price, recipe, groups) for price in (moe, dense))
    assert with_experts[0] > without[0]
    assert with_experts[1] - with_experts[0] > without[1] - without[0]
    alone = dataclasses.replace(recipe, expert=4)
    assert sharded_time(moe, alone, recipe_groups(alone, CLUSTER)) == pytest.approx(
        sharded_time(dense, alone, recipe_groups(alone, CLUSTER))
    )
    sized = {name: dataclasses.replace(each, parameters=100, expert_parameters=1000) for name, each in prices.items()}
    memory = memory_price(sized, cut_into_stages(priced_sparse().folded.blocks, recipe), recipe, groups, [1.0])
    assert memory.parts["gathered parameters"] == 2 * 2 * 1100


def test_a_merged_dispatch_sends_less_and_sorts_nothing() -> None:
    """Merged dispatch on four ranks takes 5 to 12.5 % less time per exchange, sorts nothing, and shortens the step."""
    merged, groups = under(RECIPE, merged_dispatch=True), recipe_groups(RECIPE, CLUSTER)
    for item in _exchanges(RECIPE):
        apart, together = (traffic_time(item, recipe, groups) for recipe in (RECIPE, merged))
        assert 0.875 * apart <= together < 0.95 * apart
        assert sorting_time(item, merged, CLUSTER) == 0.0 < sorting_time(item, RECIPE, CLUSTER)
    assert _seconds(merged) < _seconds(RECIPE)


def test_other_traffic_is_not_sorted() -> None:
    """Traffic over the tensor axis takes no time to sort tokens."""
    item = AxisTraffic("tensor", MoveKind.REDUCE, 2**20)
    assert sorting_time(item, RECIPE, CLUSTER) == 0.0


def test_separate_experts_launch_a_kernel_each() -> None:
    """Two separate experts on each of two ranks launch one kernel more per product, in at least the grouped time."""
    one = Execution(data=2, expert=2, micro_batch=4096)
    each = under(one, separate_experts=True)
    cluster = Cluster("h100_sxm", 1, 2)
    together, apart = (priced_sparse().counted.layer_prices(recipe, cluster) for recipe in (one, each))
    for name, price in together.items():
        before, after = price.forward.busy, apart[name].forward.busy
        products = 2 if price.expert_parameters else 0
        assert after.kernels == before.kernels + products
        assert after.matmul_s >= before.matmul_s
        assert after.flops == before.flops


def test_one_micro_batch_has_no_other_to_hide_its_exchanges() -> None:
    """Overlap of experts changes nothing with one micro-batch, and shortens a step of several."""
    hidden = under(RECIPE, overlap_expert=True)
    assert _seconds(hidden) == _seconds(RECIPE)
    several = {"micro_batch": 8192, "global_batch": 4 * 8 * 4096}
    assert _seconds(dataclasses.replace(hidden, **several)) < _seconds(dataclasses.replace(RECIPE, **several))


def test_biases_of_experts_lie_with_them() -> None:
    """Biases count as expert parameters, and forward and backward have three exchanges each.

    The exchanges are of tokens, of the weights of tokens, and of results.
    """
    hidden, count = 64, 4
    with torch.device("meta"):
        layers = [MixtureOfExperts(hidden, Experts(count, 2, hidden, 0, 0, biased=True), None) for _ in range(2)]
        priced = PricedModel(folded(Decoder([*map(Beside, layers)]).bfloat16()))
    block = priced.counted.layer_prices(RECIPE, CLUSTER)[priced.folded.blocks[0]]
    assert block.expert_parameters == 3 * hidden * hidden + 2 * hidden + hidden
    assert [len(phase.traffic) for phase in (block.forward, block.backward)] == [3, 3]


def test_steps_in_eight_bits_have_an_interval_of_their_own() -> None:
    """The interval of a step in 8 bits is wider than in 16 bits, because no run in 8 bits was fitted."""
    one, eight = (
        predict_recipe(priced_sparse().counted, dataclasses.replace(RECIPE, precision=precision), CLUSTER)
        for precision in ("bf16", "f8")
    )
    widths = [math.log(high / low) for low, high in (item.step_time_interval_s or (1, 1) for item in (one, eight))]
    assert 0 < widths[0] < widths[1]
