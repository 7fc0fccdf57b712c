"""`cut_into_stages` gives blocks to stages and ranks; schedules limit the micro-batches in flight."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard import RecipeError
from autoshard.ir.execution import Execution
from cost_models.order_times import StageTimes
from cost_models.schedule_orders import SCHEDULES, rank_orders
from passes.search.pipeline_stages import cut_into_stages, even_blocks, in_flight, rank_counts, stages_time
from tests.cost_models.in_flight import peak_in_flight


def test_blocks_are_shared_out_evenly_and_ends_lie_at_the_ends() -> None:
    """Four stages share ten blocks evenly. The first and the last stage have the layers before and after the blocks."""
    stages = cut_into_stages(("b",) * 10, Execution(pipeline=4))
    assert [dict(stage.layers).get("b") for stage in stages] == [2, 3, 3, 2]
    assert stages[0].layers[0] == ("before", 1)
    assert stages[-1].layers[-1] == ("after", 1)


def test_ends_count_as_blocks_where_they_are_split() -> None:
    """With split ends, 70 blocks on 12 stages are five on the first and last stage, and six on each other stage."""
    stages = cut_into_stages(("b",) * 70, Execution(pipeline=12, stage_layers=even_blocks(70, 12, split_ends=True)))
    assert [dict(stage.layers)["b"] for stage in stages] == [5, *[6] * 10, 5]


def test_given_counts_are_kept() -> None:
    """`stage_layers` sets the number of blocks of each stage; a wrong sum is refused."""
    stages = cut_into_stages(("b",) * 5, Execution(pipeline=2, stage_layers=(4, 1)))
    assert [dict(stage.layers)["b"] for stage in stages] == [4, 1]
    with pytest.raises(RecipeError, match="shares out 5 blocks; the model has 6"):
        cut_into_stages(("b",) * 6, Execution(pipeline=2, stage_layers=(4, 1)))


def test_a_model_without_blocks_has_no_stages() -> None:
    """A model without blocks cannot be cut into stages, with or without `stage_layers`."""
    for given in (None, (0, 0)):
        with pytest.raises(RecipeError, match="2 stages cannot share 0 blocks"):
            cut_into_stages((), Execution(pipeline=2, stage_layers=given))


@pytest.mark.parametrize(
    ("schedule", "first"),
    [("Interleaved1F1B", [0, 4]), ("InterleavedZeroBubble", [0, 4]), ("ZBVZeroBubble", [0, 7]), ("DualPipeV", [0, 7])],
)
def test_ranks_have_the_stages_that_their_schedule_gives_them(schedule: str, first: list[int]) -> None:
    """With eight stages on four ranks, the first rank has stages 0 and 4 in a looped schedule, and 0 and 7 in a V."""
    recipe = Execution(pipeline=4, virtual_stages=2, schedule=schedule, stage_layers=(1,) * 8)
    names = [f"block {index}" for index in range(8)]
    counts = rank_counts(names, cut_into_stages(names, recipe), recipe)
    assert np.flatnonzero(counts[0]).tolist() == first


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_hold_what_their_schedule_has_in_flight(schedule: str) -> None:
    """For each rank, `in_flight` is the peak of micro-batches in the schedule's order, divided by the rank's stages."""
    virtual = SCHEDULES[schedule].numbers_of_stages(2)[-1]
    recipe = Execution(pipeline=4, virtual_stages=virtual, schedule=schedule, global_batch=48)
    held = [peak_in_flight(order) for order in rank_orders(schedule, 4, 48, virtual)]
    assert in_flight(recipe) == tuple(peak / virtual for peak in held)


def test_micro_batches_that_a_schedule_does_not_take_are_refused() -> None:
    """A number of micro-batches that a schedule cannot run is refused, and the error names the schedule."""
    with pytest.raises(RecipeError, match="pipeline=4, virtual_stages=2: Interleaved1F1B on ranks=4 takes micro-b"):
        stages_time([StageTimes(1.0, 1.0, 1.0)] * 8, Execution(pipeline=4, virtual_stages=2, global_batch=9))
