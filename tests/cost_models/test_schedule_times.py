"""tests cost_models/schedule_times.py: the event simulation is the reference."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cost_models.schedule_graph import schedule_graph
from cost_models.schedule_orders import SCHEDULES
from cost_models.schedule_times import pipeline_times
from cost_models.stages import Pipeline, StageTimes
from tests.cost_models.simulated_pipelines import simulate_pipeline

SECONDS = st.one_of(st.integers(0, 16).map(lambda number: number / 8), st.floats(0, 2))
OPTIONS = st.fixed_dictionaries(
    {
        "overlap_sends": st.sampled_from([None, False, True]),
        "overlap_pairs": st.booleans(),
        "buckets": st.integers(1, 4),
        "clips_norm": st.booleans(),
    }
)
NAMES = [field.name for field in fields(StageTimes) if "communication" not in field.name]


@st.composite
def stage_times(draw):
    """Any times of a stage; what it communicates is part of what it takes."""
    stage = StageTimes(**{name: draw(SECONDS) for name in NAMES})
    share = draw(st.sampled_from([0.0, 0.25, 1.0]))
    return replace(
        stage, forward_communication_s=share * stage.forward_s, backward_communication_s=share * stage.backward_s
    )


@st.composite
def pipelines(draw):
    """A schedule, stages (alike, alike but for the ends, or all different), micro-batches, virtual stages."""
    schedule, ranks = draw(st.sampled_from([*SCHEDULES])), draw(st.integers(1, 4))
    virtual = draw(st.sampled_from(SCHEDULES[schedule].numbers_of_stages(3)))
    rounds = draw(st.integers(2, 24))
    micro_batches = rounds * (ranks + draw(st.integers(0, max(0, (ranks - 1) // rounds))))
    if not schedule.startswith("Interleaved"):
        micro_batches += draw(st.integers(0, 3))
    count = ranks * virtual
    alike = draw(st.sampled_from(["all", "middle", "none"]))
    stages = [draw(stage_times())] * count
    if alike == "none":
        stages = [draw(stage_times()) for _ in range(count)]
    elif alike == "middle":
        stages = [draw(stage_times()), *stages[1:-1], draw(stage_times())][-count:]
    return schedule, stages, micro_batches, virtual


def assert_same(pipeline, options):
    """Both ways to the times of a step agree to rounding."""
    fast, reference = pipeline_times(Pipeline(*pipeline, **options)), simulate_pipeline(Pipeline(*pipeline, **options))
    close = 1e-9 * max(1.0, reference.total_s)
    assert fast.total_s == pytest.approx(reference.total_s, rel=1e-9)
    assert fast.bubble_s == pytest.approx(reference.bubble_s, abs=close)
    for one, two in zip(fast.ranks, reference.ranks, strict=True):
        for part in fields(two):
            assert getattr(one, part.name) == pytest.approx(getattr(two, part.name), abs=close), part.name


@example(("DualPipeV", [StageTimes(1.0, 1.0, 1.0, 0.5, gather_s=9.0, reduce_s=3.0)] * 4, 40, 2),
         {"overlap_sends": False, "overlap_pairs": True, "buckets": 2, "clips_norm": True})  # fmt: skip
@given(pipelines(), OPTIONS)
def test_the_times_are_those_of_the_simulation(pipeline, options):
    """For all schedules, stages and ways to overlap."""
    assert_same(pipeline, options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("overlap_sends", [False, True])
def test_long_steps_are_those_of_the_simulation(schedule, overlap_sends):
    """Stages as a model has them: alike but for its ends."""
    virtual = SCHEDULES[schedule].numbers_of_stages(2)[-1]
    stages = [StageTimes(1.0, 1.25, 0.75, 0.1, activation_bytes=1.0)] * (4 * virtual)
    stages[0], stages[-1] = replace(stages[0], forward_s=1.05), replace(stages[0], forward_s=1.5, reduce_s=20.0)
    assert_same((schedule, stages, 80, virtual), {"overlap_sends": overlap_sends})


@pytest.mark.parametrize("schedule", [name for name, item in SCHEDULES.items() if item.repeats])
def test_a_steady_state_is_looked_at_once(schedule):
    """A million micro-batches cost no more nodes than a hundred."""
    virtual = SCHEDULES[schedule].numbers_of_stages(2)[-1]
    stages = [StageTimes(1.0, 1.0, 1.0)] * (4 * virtual)
    few, many = (pipeline_times(Pipeline(schedule, stages, count, virtual)) for count in (100, 1_000_000))
    assert many.nodes == few.nodes
    work = 3.0 * virtual * 999_900
    assert many.total_s - few.total_s == pytest.approx(work)
    assert many.bubble_s == pytest.approx(few.bubble_s, abs=1e-3)


def test_a_late_steady_state_is_waited_for():
    """The last stage is a little slower: the others run ahead for many micro-batches until they wait for it."""
    stages = [StageTimes(1.0, 1.25, 0.75, send_s=0.25)] * 8
    stages[-1] = replace(stages[0], forward_s=1.1)
    pipeline = ("ZBVZeroBubble", stages, 400, 2)
    once = len(schedule_graph("ZBVZeroBubble", 4, 16, 2).first)
    assert pipeline_times(Pipeline(*pipeline)).nodes > 2 * once
    assert_same(pipeline, {})
