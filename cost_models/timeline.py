"""Event simulation of one step: tasks with dependencies on in-order streams (CUDA's semantics).

A stream runs one task at a time in the order given; a task starts when its stream is free and its dependencies ended:

    start(i) = max(end(previous on the stream), max over dependencies j of end(j)),  end(i) = start(i) + duration(i)

Streams belong to processes (ranks that differ; ranks that do the same at the same time are one process).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cost_models.errors import CostArgumentError

COMPUTE = "compute"


class Task(NamedTuple):
    """A piece of work: `duration_s` on `stream`, after the tasks in `after` (by index, all earlier in the list)."""

    name: str
    stream: str
    duration_s: float
    after: tuple[int, ...] = ()
    process: int = 0


class Span(NamedTuple):
    """When a task ran, and on which stream of which process (an index into the timeline's `processes`)."""

    name: str
    stream: str
    start_s: float
    end_s: float
    process: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """The simulated step: spans in the order of their tasks, and the names of the processes that they run on."""

    spans: tuple[Span, ...]
    processes: tuple[str, ...] = ("rank 0",)

    @property
    def total_s(self) -> float:
        """End of the last task."""
        return max((span.end_s for span in self.spans), default=0.0)

    def busy_s(self, process: int = 0) -> dict[str, float]:
        """By stream of a process, the sum of its durations."""
        busy: dict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.process == process:
                busy[span.stream] += span.end_s - span.start_s
        return dict(busy)

    def exposed_s(self, process: int = 0, compute_stream: str = COMPUTE) -> dict[str, float]:
        """By stream but the compute stream, the time in which it runs and the compute stream does not."""
        streams: dict[str, list[Span]] = defaultdict(list)
        for span in self.spans:
            if span.process == process:
                streams[span.stream].append(span)
        computing = streams.pop(compute_stream, [])
        return {name: _uncovered(spans, computing) for name, spans in streams.items()}


def simulate(tasks: Sequence[Task], processes: Sequence[str] = ("rank 0",)) -> Timeline:
    """Run the tasks in order.

    Raises:
        CostArgumentError: a negative duration, or a dependency that is not an earlier task.
    """
    free: dict[tuple[int, str], float] = {}
    spans: list[Span] = []
    for index, task in enumerate(tasks):
        _check(index, task)
        stream = (task.process, task.stream)
        start = free.get(stream, 0.0)
        for before in task.after:
            start = max(start, spans[before].end_s)
        free[stream] = start + task.duration_s
        spans.append(Span(task.name, task.stream, start, free[stream], task.process))
    return Timeline(tuple(spans), tuple(processes))


def serial_sum(tasks: Iterable[Task]) -> float:
    """Sum of all durations: no schedule that is never idle takes longer."""
    return sum(task.duration_s for task in tasks)


def critical_path(tasks: Sequence[Task]) -> float:
    """Longest chain of dependent durations: no schedule is shorter."""
    ends: list[float] = []
    for task in tasks:
        ends.append(task.duration_s + max((ends[before] for before in task.after), default=0.0))
    return max(ends, default=0.0)


def _check(index: int, task: Task) -> None:
    if task.duration_s < 0:
        raise CostArgumentError(f"Task {task.name!r} has duration_s={task.duration_s!r}, which is negative.")
    for before in task.after:
        if not 0 <= before < index:
            raise CostArgumentError(f"Task {index} {task.name!r} waits for task {before}, which is not before it.")


def _uncovered(spans: Sequence[Span], cover: Sequence[Span]) -> float:
    """Total length of `spans` outside `cover`; both are in order and do not overlap among themselves."""
    total, first = 0.0, 0
    for span in spans:
        position = span.start_s
        while first < len(cover) and cover[first].end_s <= span.start_s:
            first += 1
        index = first
        while index < len(cover) and cover[index].start_s < span.end_s:
            total += max(0.0, cover[index].start_s - position)
            position = max(position, cover[index].end_s)
            index += 1
        total += max(0.0, span.end_s - position)
    return total
