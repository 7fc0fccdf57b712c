"""The time of a pipeline's step, from what its stages take."""

from __future__ import annotations

import pytest

from autoshard.ir.staged import Crossing
from passes.lowering.order_pipeline import order_pipeline
from passes.prediction.simulate_order import StageSeconds, simulate_order


@pytest.mark.parametrize(("clips_norm", "ends"), [(False, {6.5, 7.5}), (True, {6.5, 9.0})])
def test_updates_wait_for_all_ranks_where_the_norm_is_that_of_all(clips_norm: bool, ends: set[float]) -> None:
    """The last stage is done with its backward after 4.5 seconds, and the first after 6."""
    sent = {Crossing("x", 0, 1, True): 0.5, Crossing("dx", 1, 0, False): 0.0}
    stages = [StageSeconds(1.0, 1.5, update=0.5), StageSeconds(1.0, 2.0, update=3.0)]
    times = simulate_order(order_pipeline("1F1B", 2, 1), stages, sent, clips_norm=clips_norm)
    assert {span.end_s for span in times.timeline.spans if span.name == "update"} == ends
    assert times.total_s == max(ends)
    assert [sum((rank.computed, rank.waited, rank.bubble)) for rank in times.ranks] == [times.total_s] * 2
