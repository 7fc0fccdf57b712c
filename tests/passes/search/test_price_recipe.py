"""The time of a recipe's step follows from the prices of its layer classes."""

from __future__ import annotations

import dataclasses

import pytest

from autoshard import Cluster
from autoshard.ir.execution import Execution
from cost_models.collectives import all_gather_time
from cost_models.hardware import Cluster as PricedCluster
from cost_models.hardware import node_type
from cost_models.step import InStep
from cost_models.streams import concurrent_time
from passes.search.pipeline_stages import cut_into_stages
from passes.search.price_ends import exchange_times
from passes.search.price_recipe import (
    Step,
    accumulation_bytes,
    copies_time,
    layer_times,
    send_time,
    sharded_time,
)
from passes.search.recipe_groups import recipe_groups
from tests.passes.decoders import HIDDEN, SEQUENCE, priced_dense
from tests.passes.executions import under


def _cluster(recipe: Execution) -> Cluster:
    return Cluster("h100_sxm", max(1, recipe.devices // 8), min(8, recipe.devices))


def _seconds(recipe: Execution, cluster: PricedCluster | None = None) -> float:
    cluster = cluster or _cluster(recipe)
    prices = priced_dense(8).counted.layer_prices(recipe, cluster)
    groups = recipe_groups(recipe, cluster)
    return Step(prices, cut_into_stages(priced_dense(8).folded.blocks, recipe), recipe, groups, cluster).time_s


def test_a_micro_batch_more_takes_its_own_time() -> None:
    """Without a pipeline, each further micro-batch adds the same time to a step."""
    one, two, three = (_seconds(Execution(micro_batch=2, global_batch=2 * count)) for count in (2, 3, 4))
    assert two - one == pytest.approx(three - two)


def test_slower_kernels_make_slower_steps() -> None:
    """A step of 16 ranks is longer if kernels, or messages between nodes, take three times as long."""
    recipe = Execution(data=16, micro_batch=8192)
    node = node_type("h100_sxm")
    plain, kernels, network = (
        _seconds(recipe, PricedCluster(node, 2, 8, InStep(**factors)))
        for factors in ({}, {"kernels": 3.0}, {"network": 3.0})
    )
    assert kernels > plain < network


def test_the_host_bounds_small_kernels_unless_a_graph_is_captured() -> None:
    """A tiny model's step takes less than 60 % of its time in a CUDA graph, which spares the host's launches."""
    assert _seconds(under(Execution(), cuda_graph=True)) < 0.6 * _seconds(Execution())


def test_a_part_that_is_handed_on_is_gathered_unless_the_next_stage_reads_parts() -> None:
    """Without sequence parallelism, a send between stages also takes the all-gather of the tensor ranks' parts."""
    whole = Execution(tensor=4, pipeline=2, micro_batch=64)
    split = dataclasses.replace(whole, sequence_parallel=True)
    cluster = _cluster(whole)
    groups = recipe_groups(whole, cluster)
    sent_s = [send_time(priced_dense(8).counted.layer_prices(each, cluster), each, groups) for each in (split, whole)]
    gathered_s = all_gather_time(64 * SEQUENCE * HIDDEN * 2, groups.tensor)
    assert sent_s[1] - sent_s[0] == pytest.approx(gathered_s)


def test_early_stop_saves_the_last_product() -> None:
    """Full recomputation with early stop is slower than no recomputation, and faster than without early stop."""
    recipes = [
        Execution(micro_batch=64, recompute="none"),
        under(Execution(micro_batch=64, recompute="full"), early_stop=True),
    ]
    recipes.append(under(recipes[1], early_stop=False))
    none, early, full = map(_seconds, recipes)
    assert none < early < full


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_copies_to_the_host_run_beside_a_blocks_own_work(recompute: str) -> None:
    """A block's copies to the host run beside its forward, and copies back beside its recomputation and backward."""
    recipe = under(Execution(micro_batch=64, recompute=recompute), cuda_graph=True)
    away = dataclasses.replace(recipe, offload="activations")
    cluster = _cluster(recipe)
    prices = priced_dense(8).counted.layer_prices(recipe, cluster)
    groups = recipe_groups(recipe, cluster)
    for name in dict.fromkeys(priced_dense(8).folded.blocks):
        here, there = (layer_times({name: prices[name]}, each, groups, cluster) for each in (recipe, away))
        out_s, back_s = copies_time(prices[name], away, cluster, is_block=True)
        assert out_s > 0
        assert there.forward_s[0] == concurrent_time(here.forward_s[0], out_s)
        backward_s = concurrent_time(here.backward_s[0] + here.recompute_s[0], back_s)
        assert there.backward_s[0] + there.recompute_s[0] == pytest.approx(backward_s)
    assert _seconds(away) > _seconds(recipe)


def test_overlap_hides_communication() -> None:
    """A step with overlapped gradients and collectives is shorter than the same step without overlap."""
    base = Execution(data=8, tensor=8, micro_batch=16)
    apart = under(base, overlap_gradients=False, overlap_tensor=False, overlap_parameters=False)
    hidden, shown = map(_seconds, (base, apart))
    assert hidden < shown


def test_gradients_are_summed_only_over_several_micro_batches() -> None:
    """A sum of gradients moves no bytes for one micro-batch, and ten bytes per parameter for two."""
    price = priced_dense(8).counted.layer_prices(Execution(), _cluster(Execution()))["layers:0"]
    assert accumulation_bytes(price, Execution()) == 0
    assert accumulation_bytes(price, Execution(global_batch=2)) == 10 * price.parameters


def test_selective_recomputation_repeats_nothing_of_fused_attention() -> None:
    """With fused attention, which keeps no scores, selective recomputation recomputes nothing."""
    recipe = Execution(recompute="selective")
    cluster = _cluster(recipe)
    prices = priced_dense(8).counted.layer_prices(recipe, cluster)
    assert not layer_times(prices, recipe, recipe_groups(recipe, cluster), cluster).recompute_s.any()


def test_blocking_launches_add_the_host_to_the_device() -> None:
    """Blocking launches lengthen a step, whether its kernels are short or long."""
    for micro_batch in (1, 8192):
        free, blocking = (under(Execution(micro_batch=micro_batch), blocking_launches=flag) for flag in (False, True))
        assert _seconds(blocking) > _seconds(free)


def test_listing_costs_host_time_for_every_rank_and_matrix() -> None:
    """Listed collectives lengthen ZeRO-3's gathers, on 64 ranks by more than on 8."""

    def extra(data: int) -> float:
        times = []
        for listed in (False, True):
            recipe = under(Execution(data=data, zero=3), listed_collectives=listed)
            cluster = _cluster(recipe)
            price = priced_dense(8).counted.layer_prices(recipe, cluster)["layers:0"]
            times.append(sharded_time(price, recipe, recipe_groups(recipe, cluster))[0])
        return times[1] - times[0]

    assert 0 < extra(8) < extra(64)


def test_ranks_that_keep_shards_of_gradients_reduce_those_of_each_micro_batch() -> None:
    """ZeRO-2 is slower than ZeRO-1 only with several micro-batches, because ZeRO-2 reduces gradients in each."""
    for batch in (8, 64):
        one, two = (under(Execution(data=8, zero=zero, global_batch=batch), overlap_gradients=False) for zero in (1, 2))
        cluster = _cluster(one)
        groups = recipe_groups(two, cluster)
        prices = priced_dense(8).counted.layer_prices(two, cluster).values()
        reduced_s = sum(sharded_time(price, two, groups)[1] for price in prices)
        assert (reduced_s > 0) == (batch > 8) == (_seconds(two) > _seconds(one))


def test_a_step_waits_for_gradients_once_or_for_each_micro_batch() -> None:
    """Only ZeRO-1 reduces gradients at the end of a step; ZeRO-2 and ZeRO-3 reduce them in each micro-batch."""
    for zero, is_reduced in ((1, True), (2, False), (3, False)):
        recipe = Execution(data=8, zero=zero, global_batch=64)
        cluster = _cluster(recipe)
        reduce_s, _ = exchange_times(1e9, 1e9, recipe, recipe_groups(recipe, cluster))
        assert (reduce_s > 0) == is_reduced
