"""tests cost_models/stages.py: what a pipeline's numbers may be."""

from __future__ import annotations

import pytest

from cost_models.errors import CostArgumentError
from cost_models.stages import Pipeline, StageTimes


@pytest.mark.parametrize(
    ("stages", "virtual", "message"),
    [
        ([], 1, "0 stages do not lie evenly"),
        ([StageTimes(1, 1, 1)] * 3, 2, "3 stages do not lie evenly"),
        ([StageTimes(1, -1, 1)], 1, "Stage 0 has backward_input_s=-1"),
        ([StageTimes(1, float("nan"), 1)], 1, "Stage 0 has backward_input_s=nan"),
    ],
)
def test_impossible_pipelines_raise(stages, virtual, message):
    """The message names the stage and its time."""
    with pytest.raises(CostArgumentError, match=message):
        Pipeline("LoopedBFS", stages, 2, virtual)


def test_transfers_overlap_as_torchs_schedules_do() -> None:
    """All but 1F1B's, whose ranks swap, unless it is said otherwise."""
    stages = [StageTimes(1.0, 1.0, 1.0)] * 2
    assert not Pipeline("1F1B", stages, 4).sends_overlap
    assert Pipeline("1F1B", stages, 4, overlap_sends=True).sends_overlap
    assert Pipeline("GPipe", stages, 4).sends_overlap
    assert not Pipeline("GPipe", stages, 4, overlap_sends=False).sends_overlap
