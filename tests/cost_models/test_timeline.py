"""tests cost_models/timeline.py."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cost_models.errors import CostArgumentError
from cost_models.timeline import Task, critical_path, serial_sum, simulate


@st.composite
def task_lists(draw):
    tasks = []
    for index in range(draw(st.integers(0, 12))):
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else ()
        stream = draw(st.sampled_from(["compute", "data", "model"]))
        tasks.append(Task(f"task{index}", stream, draw(st.integers(0, 100)) / 8, tuple(after)))
    return tasks


@given(task_lists())
def test_total_lies_between_critical_path_and_serial_sum(tasks):
    """No schedule beats its longest chain or its busiest stream, and an in-order one never idles altogether."""
    line = simulate(tasks)
    assert critical_path(tasks) <= line.total_s <= serial_sum(tasks)
    assert all(busy <= line.total_s for busy in line.busy_s().values())


@given(task_lists())
def test_spans_respect_dependencies_and_streams(tasks):
    """A task starts after what it waits for, and streams run one task at a time, in order."""
    spans = simulate(tasks).spans
    last = {}
    for task, span in zip(tasks, spans, strict=True):
        assert all(spans[before].end_s <= span.start_s for before in task.after)
        assert last.get(task.stream, 0.0) <= span.start_s
        last[task.stream] = span.end_s


@given(task_lists())
def test_exposed_time_is_what_compute_does_not_cover(tasks):
    """Counted on a fine grid (durations are eighths)."""
    line = simulate(tasks)
    computing = [(s.start_s, s.end_s) for s in line.spans if s.stream == "compute"]
    for stream, exposed in line.exposed_s().items():
        ticks = [
            tick
            for span in line.spans
            if span.stream == stream
            for tick in range(round(span.start_s * 8), round(span.end_s * 8))
            if not any(start * 8 <= tick < end * 8 for start, end in computing)
        ]
        assert exposed == pytest.approx(len(ticks) / 8)


@given(task_lists(), st.data())
def test_a_shorter_task_never_delays_the_step(tasks, data):
    """In-order streams have no scheduling anomalies."""
    assume(tasks)
    index = data.draw(st.integers(0, len(tasks) - 1))
    task = tasks[index]
    faster = [*tasks[:index], Task(task.name, task.stream, task.duration_s / 2, task.after), *tasks[index + 1 :]]
    assert simulate(faster).total_s <= simulate(tasks).total_s


def test_overlapped_communication_is_not_exposed():
    """A gather of 3 s under 2 s of compute leaves 1 s exposed."""
    line = simulate([Task("gather", "data", 3.0), Task("mm", "compute", 2.0), Task("use", "compute", 1.0, (0,))])
    assert (line.total_s, line.exposed_s()["data"]) == (4.0, 1.0)


def test_processes_have_streams_of_their_own():
    """Two ranks compute at once; what one exposes is not the other's."""
    tasks = [Task("mm", "compute", 2.0), Task("mm", "compute", 3.0, (), 1), Task("send", "link", 1.0, (0,))]
    line = simulate(tasks, ("rank 0", "rank 1"))
    assert line.total_s == 3.0
    assert (line.busy_s(0), line.busy_s(1)) == ({"compute": 2.0, "link": 1.0}, {"compute": 3.0})
    assert (line.exposed_s(0), line.exposed_s(1)) == ({"link": 1.0}, {})


def test_impossible_tasks_raise():
    """A negative duration, or waiting for a later task."""
    with pytest.raises(CostArgumentError, match="negative"):
        simulate([Task("a", "compute", -1.0)])
    with pytest.raises(CostArgumentError, match="not before it"):
        simulate([Task("a", "compute", 1.0, (0,))])
