"""Sends and receives between stages on different ranks are added to a schedule, whose other tasks keep their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir.pipeline_order import PipelineOrder
from cost_models.errors import CostArgumentError
from cost_models.schedule_orders import SCHEDULES, rank_orders
from passes.lowering.order_pipeline import order_pipeline


@given(st.sampled_from([*SCHEDULES]), st.integers(1, 4), st.integers(2, 3))
def test_a_rank_computes_what_the_schedule_says(schedule: str, ranks: int, rounds: int) -> None:
    """A rank computes its tasks in the order of the schedule, including paired tasks."""
    shape = (schedule, ranks, ranks * rounds, SCHEDULES[schedule].numbers_of_stages(2)[-1])
    computes = [
        [tuple(map(str, slot)) for slot in slots if not slot[0].work.is_transfer]
        for slots in order_pipeline(*shape).ranks
    ]
    assert computes == [[tuple(map(str, slot)) for slot in order] for order in rank_orders(*shape)]


@pytest.mark.parametrize("schedule", [name for name, item in SCHEDULES.items() if item.is_v])
def test_stages_on_one_rank_send_each_other_nothing(schedule: str) -> None:
    """Stages on one rank exchange no messages.

    In a V of four stages on two ranks, two of three boundaries have messages.
    """
    assert _transfers(order_pipeline(schedule, 2, 4, 2)) == 2 * 2 * 2 * 4  # boundaries, ends, directions, micro-batches
    assert _transfers(order_pipeline(schedule, 1, 4, 2)) == 0


def _transfers(order: PipelineOrder) -> int:
    return sum(slot[0].work.is_transfer for slots in order.ranks for slot in slots)


def test_numbers_that_a_schedule_does_not_admit_are_refused() -> None:
    """A number of virtual stages that the schedule does not allow is refused, and the error names the schedule."""
    with pytest.raises(CostArgumentError, match="1F1B needs virtual_stages=1; it has 2"):
        order_pipeline("1F1B", 2, 4, 2)
