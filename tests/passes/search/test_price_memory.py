"""The predicted memory of a recipe's rank with the highest peak, by parts."""

from __future__ import annotations

import dataclasses

import pytest

from autoshard import Cluster
from autoshard.ir.execution import Execution
from autoshard.ir.runtime import OURS
from passes.search.pipeline_stages import cut_into_stages
from passes.search.price_memory import MemoryPrice, memory_price, state_bytes
from passes.search.recipe_groups import recipe_groups
from tests.passes.decoders import dense, priced_dense
from tests.passes.executions import under

ELEMENTS = sum(parameter.numel() for parameter in dense(8).parameters())


def _memory(recipe: Execution, in_flight: float = 1.0) -> MemoryPrice:
    cluster = Cluster("h100_sxm", max(1, recipe.devices // 8), min(8, recipe.devices))
    priced = priced_dense(8)
    prices = priced.counted.layer_prices(recipe, cluster)
    stages = cut_into_stages(priced.folded.blocks, recipe)
    return memory_price(prices, stages, recipe, recipe_groups(recipe, cluster), (in_flight,) * recipe.pipeline)


def test_state_is_counted_in_bytes_per_parameter() -> None:
    """A parameter takes two bytes, its gradient four, and its master weight and moments twelve."""
    parts = _memory(Execution()).parts
    assert parts["parameters"] == 2 * ELEMENTS
    assert parts["gradients"] == 4 * ELEMENTS
    assert parts["optimizer state"] == 12 * ELEMENTS


def test_zero_3_keeps_one_master_weight() -> None:
    """With ZeRO-3 the shard of a parameter is its float32 master weight, and gathered parameters take memory."""
    parts = _memory(Execution(data=8, zero=3)).parts
    assert parts["parameters"] == pytest.approx(4 * ELEMENTS / 8)
    assert parts["optimizer state"] == pytest.approx(8 * ELEMENTS / 8)
    assert parts["gathered parameters"] > 0


def test_micro_batches_in_flight_keep_their_activations() -> None:
    """Three micro-batches in flight have three times the activations of one micro-batch."""
    recipe = Execution(pipeline=2, micro_batch=512, global_batch=4096)
    one, three = (_memory(recipe, in_flight=count).parts["activations"] for count in (1.0, 3.0))
    assert three == 3 * one


def test_the_update_counts_where_it_is_the_peak() -> None:
    """The update's float32 copy of bfloat16 gradients counts only if activations do not make a higher peak."""
    small = under(Execution(), gradient_dtype="bf16")
    assert "update" in _memory(small).parts
    assert "update" not in _memory(dataclasses.replace(small, micro_batch=1024)).parts


def test_offloaded_state_is_not_on_the_device() -> None:
    """Offloaded optimizer state takes no memory of the device."""
    assert "optimizer state" not in _memory(Execution(data=2, zero=1, offload="optimizer")).parts


def test_gradients_beside_their_sum_take_memory() -> None:
    """A separate sum of gradients takes two more bytes for each parameter."""
    apart, together = (_memory(under(Execution(), separate_sum=flag)).parts["gradients"] for flag in (True, False))
    assert apart - together == 2 * ELEMENTS


@pytest.mark.parametrize(
    ("pipeline", "zero", "expected"), [(1, 1, (2, 3)), (2, 1, (4, 2)), (1, 3, (1, 2)), (2, 3, (1, 2))]
)
def test_our_pipelines_hold_their_parameters_in_float32(pipeline: int, zero: int, expected: tuple[int, int]) -> None:
    """Under `OURS`, a parameter and its state take the expected bytes per rank; pipelines keep float32 parameters."""
    recipe = Execution(data=4, zero=zero, pipeline=pipeline, runtime=OURS)
    found = state_bytes(1, 0, 4, recipe)
    assert (found["parameters"], found["optimizer state"]) == expected


@pytest.mark.parametrize(
    ("frozen_masters", "zero", "expected"), [(False, 0, 2), (False, 3, 0.5), (True, 0, 6), (True, 3, 1)]
)
def test_frozen_parameters_have_neither_gradients_nor_moments(frozen_masters: bool, zero: int, expected: float) -> None:
    """On each of four ranks, a frozen parameter takes a 16-bit copy and, if asked for, a master weight."""
    recipe = under(Execution(data=4, zero=zero, runtime=OURS), frozen_masters=frozen_masters)
    found = state_bytes(0, 1, 4, recipe)
    assert found["gradients"] == 0
    assert found["parameters"] + found["optimizer state"] == expected
