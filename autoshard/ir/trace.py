"""Timelines of steps, as data of a plan and as files for chrome://tracing and ui.perfetto.dev.

The file is the JSON object form of Chrome's trace event format. Ranks with equal timelines share one process, and each
stream is a thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from autoshard.errors import PlanMismatchError
from autoshard.ir.files import write_text
from autoshard.ir.read_json import check_keys, read

_SEPARATOR = " | "


class TraceSpan(NamedTuple):
    """Work on a stream of a process, in whole nanoseconds; `process` is an index into `Trace.processes`."""

    process: int
    stream: str
    name: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A timeline: names of its processes, and spans, which do not overlap on a stream."""

    processes: tuple[str, ...]
    spans: tuple[TraceSpan, ...]

    @classmethod
    def of(cls, processes: Sequence[str], spans: Iterable[tuple[int, str, str, float, float]]) -> Trace:
        """Return a trace of spans, each given as (process, stream, name, start, end) with times in seconds."""
        made = []
        for process, stream, name, start_s, end_s in spans:
            start = round(start_s * 1e9)
            made.append(TraceSpan(process, stream, name, start, round(end_s * 1e9) - start))
        return cls(tuple(processes), tuple(made))

    def events(self) -> list[dict[str, Any]]:
        """Return Chrome's trace events, with times in microseconds: names of processes and threads, then the spans."""
        streams = dict.fromkeys((span.process, span.stream) for span in self.spans)
        threads = {key: number for number, key in enumerate(streams)}
        events: list[dict[str, Any]] = [_name("process_name", pid, 0, name) for pid, name in enumerate(self.processes)]
        events += [_name("thread_name", key[0], thread, key[1]) for key, thread in threads.items()]
        for span in self.spans:
            thread = threads[span.process, span.stream]
            times = {"ts": span.start_ns / 1e3, "dur": span.duration_ns / 1e3}
            events.append(
                {"name": span.name, "cat": span.stream, "ph": "X", "pid": span.process, "tid": thread} | times
            )
        return events

    def write(self, path: str | Path) -> None:
        """Write the trace as a file in Chrome's trace event format."""
        document = {"traceEvents": self.events(), "displayTimeUnit": "ms"}
        write_text(path, json.dumps(document) + "\n")

    def to_json(self) -> dict[str, Any]:
        """Return JSON data with a line of text for each span: `process | start_ns | duration_ns | stream | name`."""
        lines = [
            _SEPARATOR.join((str(span.process), str(span.start_ns), str(span.duration_ns), span.stream, span.name))
            for span in self.spans
        ]
        return {"processes": list(self.processes), "spans": lines}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trace:
        """Read the data of `to_json`. Raises `PlanMismatchError` for any other data."""
        found = read(Mapping[str, tuple[str, ...]], data, _PLACE)
        check_keys(found, _KEYS, _KEYS, _PLACE)
        processes, lines = (found[key] for key in _KEYS)
        return cls(processes, tuple(_span(line, len(processes)) for line in lines))


_KEYS = ("processes", "spans")
_PLACE = ("timeline",)
_SPAN = re.compile(r"(\d+) \| (-?\d+) \| (-?\d+) \| (.*?) \| (.*)", re.DOTALL)


def _span(line: str, processes: int) -> TraceSpan:
    found = _SPAN.fullmatch(line)
    if found is None or int(found[1]) >= processes:
        raise PlanMismatchError(
            f"{line!r} is no span of the timeline's {processes} processes. A span reads "
            "'process | start_ns | duration_ns | stream | name', with processes counted from 0."
        )
    process, start, duration, stream, name = found.groups()
    return TraceSpan(int(process), stream, name, int(start), int(duration))


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
