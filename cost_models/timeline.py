"""Event simulation of one step: tasks with dependencies on in-order streams (CUDA's semantics), and its trace.

A stream runs one task at a time in the order given; a task starts when its stream is free and its dependencies ended:

    start(i) = max(end(previous on the stream), max over dependencies j of end(j)),  end(i) = start(i) + duration(i)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cost_models.errors import CostArgumentError

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work: `duration_s` on `stream`, after the tasks in `after` (by index, all earlier in the list)."""

    name: str
    stream: str
    duration_s: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran."""

    name: str
    stream: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The simulated step.

    Args:
        spans: one per task, in their order.
        total_s: end of the last task.
        busy_s: by stream, the sum of its durations.
        exposed_s: by stream but the compute stream, the time in which it runs and the compute stream does not.
    """

    spans: tuple[Span, ...]
    total_s: float
    busy_s: Mapping[str, float]
    exposed_s: Mapping[str, float]


def simulate(tasks: Sequence[Task], compute_stream: str = COMPUTE) -> Timeline:
    """Run the tasks in order.

    Raises:
        CostArgumentError: a negative duration, or a dependency that is not an earlier task.
    """
    free: dict[str, float] = {}
    spans: list[Span] = []
    for index, task in enumerate(tasks):
        _check(index, task)
        ready = max((spans[before].end_s for before in task.after), default=0.0)
        start = max(ready, free.get(task.stream, 0.0))
        free[task.stream] = start + task.duration_s
        spans.append(Span(task.name, task.stream, start, free[task.stream]))
    busy: dict[str, float] = {}
    for task in tasks:
        busy[task.stream] = busy.get(task.stream, 0.0) + task.duration_s
    return Timeline(tuple(spans), max(free.values(), default=0.0), busy, _exposed(spans, compute_stream))


def serial_sum(tasks: Iterable[Task]) -> float:
    """Sum of all durations: no schedule that is never idle takes longer."""
    return sum(task.duration_s for task in tasks)


def critical_path(tasks: Sequence[Task]) -> float:
    """Longest chain of dependent durations: no schedule is shorter."""
    ends: list[float] = []
    for task in tasks:
        ends.append(task.duration_s + max((ends[before] for before in task.after), default=0.0))
    return max(ends, default=0.0)


def trace_json(timeline: Timeline, process: str = "rank 0") -> str:
    """The timeline in Chrome's trace event format (chrome://tracing, ui.perfetto.dev): one thread per stream, in us."""
    streams = list(dict.fromkeys(span.stream for span in timeline.spans))
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": process}}
    ]
    for thread, stream in enumerate(streams):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": thread, "args": {"name": stream}})
    for span in timeline.spans:
        place = {"pid": 0, "tid": streams.index(span.stream)}
        when = {"ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6}
        events.append({"name": span.name, "ph": "X", **place, **when})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _check(index: int, task: Task) -> None:
    if task.duration_s < 0:
        raise CostArgumentError(f"Task {task.name!r} has duration_s={task.duration_s!r}, which is negative.")
    late = [before for before in task.after if not 0 <= before < index]
    if late:
        raise CostArgumentError(f"Task {index} {task.name!r} waits for task {late[0]}, which is not before it.")


def _exposed(spans: Sequence[Span], compute_stream: str) -> dict[str, float]:
    computing = [span for span in spans if span.stream == compute_stream]
    others = dict.fromkeys(span.stream for span in spans if span.stream != compute_stream)
    return {name: _uncovered([span for span in spans if span.stream == name], computing) for name in others}


def _uncovered(spans: Sequence[Span], cover: Sequence[Span]) -> float:
    """Total length of `spans` outside `cover`; both are in order and do not overlap among themselves."""
    total, first = 0.0, 0
    for span in spans:
        position = span.start_s
        while first < len(cover) and cover[first].end_s <= span.start_s:
            first += 1
        for other in cover[first:]:
            if other.start_s >= span.end_s:
                break
            total += max(0.0, other.start_s - position)
            position = max(position, other.end_s)
        total += max(0.0, span.end_s - position)
    return total
