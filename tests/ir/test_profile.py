"""Profiles of steps: their parts, and differences between measured and predicted seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir.profile import ELSE, PredictedSteps, Profile, RangeCost, RangeSpan, StepSpans, measured_seconds
from cost_models.hardware import Cluster

REDUCE = "communication over data: all-reduce of head"
WAIT = "communication over data: waiting for the all-reduce of head"
NAMES = ["forward: up mm", "backward: up mm", "update: up adamw", REDUCE, WAIT, "communication over model: all-gather"]
MS = 10**6


@st.composite
def steps(draw: st.DrawFn) -> StepSpans:
    """Draw a step whose spans may overlap."""
    duration = draw(st.integers(1, 1000))
    ends = st.tuples(st.integers(0, duration), st.integers(0, duration)).map(sorted)
    spans = draw(st.lists(st.tuples(st.sampled_from(NAMES), ends), max_size=8))
    return StepSpans(duration, tuple(RangeSpan(name, *times) for name, times in spans))


@given(steps())
def test_parts_add_up_to_the_step(step: StepSpans) -> None:
    """The parts of a step add up to its duration, whichever spans overlap, and none is negative."""
    assert sum(step.parts.values()) == pytest.approx(step.duration_ns / 1e9)
    assert min(step.parts.values()) >= 0


def step_of(compute_ms: int, reduce_ms: int) -> StepSpans:
    """A step of 20 ms with a product, and a collective that starts in the product's middle."""
    middle = compute_ms * MS // 2
    spans = (
        RangeSpan("forward: layers.0.up mm", 0, compute_ms * MS),
        RangeSpan(REDUCE, middle, middle + reduce_ms * MS),
    )
    return StepSpans(20 * MS, spans)


def profile_of(*ranks: StepSpans) -> Profile:
    costs = (RangeCost("forward: layers.0.up mm", "matmul.f32", 1, 0.004), RangeCost(REDUCE, "link.intra", 0, 0.001))
    predicted = PredictedSteps((step_of(4, 1),), (costs,), Cluster("h100_sxm", 1, 2))
    return Profile(tuple((step,) for step in ranks), predicted, (0,) * len(ranks))


def test_communication_counts_while_no_operator_runs() -> None:
    assert step_of(6, 5).parts == pytest.approx({"forward": 0.006, "communication over data": 0.002, ELSE: 0.012})


def test_a_collective_takes_the_time_of_the_rank_that_joins_last() -> None:
    """A collective has the shortest time of the ranks, that of the last to join, and an operator has the mean."""
    ranks = [(step_of(6, 9),), (step_of(10, 5),)]
    assert measured_seconds(ranks) == pytest.approx({"forward: layers.0.up mm": 0.008, REDUCE: 0.005})


def test_the_largest_difference_comes_first() -> None:
    """Differences of measured and predicted seconds are sorted by size, and equal blocks share a name with a star."""
    first, second = profile_of(step_of(6, 9), step_of(10, 9)).differences
    assert first == pytest.approx((REDUCE, 0.009, 0.001))
    assert second == pytest.approx(("forward: layers.*.up mm", 0.008, 0.004))


def test_parts_of_a_profile_add_up() -> None:
    """The measured parts add up to the measured step, and the predicted parts to the predicted step."""
    profile = profile_of(step_of(6, 9), step_of(10, 9))
    measured, predicted = (sum(each) for each in zip(*profile.parts.values(), strict=True))
    assert measured == pytest.approx(profile.step_time_s)
    assert predicted == pytest.approx(profile.predicted_step_time_s)


def test_a_timeline_has_both_rows_of_each_rank() -> None:
    """Each rank is a process with measured and predicted rows, and each rank's step starts at 0."""
    trace = profile_of(step_of(6, 9), step_of(10, 9)).timeline
    assert trace.processes == ("rank 0", "rank 1")
    rows = {(span.process, span.stream) for span in trace.spans}
    streams = ("measured", "measured communication over data", "predicted", "predicted communication over data")
    assert rows == {(rank, stream) for rank in (0, 1) for stream in streams}
    assert {span.start_ns for span in trace.spans if span.name.startswith("forward")} == {0}
