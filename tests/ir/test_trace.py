"""Traces have the format of Perfetto and Chrome, and are read back from JSON equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir.trace import Trace

_NAMES = st.text("abcz_.0123456789 |@", min_size=1, max_size=12)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Spans in order on a few streams of a few processes."""
    processes = draw(st.lists(_NAMES, min_size=1, max_size=3))
    streams = ["compute", "network", "to rank 1"]
    free: dict[tuple[int, str], float] = {}
    spans = []
    for _ in range(draw(st.integers(0, 12))):
        process, stream = draw(st.integers(0, len(processes) - 1)), draw(st.sampled_from(streams))
        start = free.get((process, stream), 0.0) + draw(st.floats(0, 1))
        free[process, stream] = start + draw(st.floats(0, 1))
        spans.append((process, stream, draw(_NAMES), start, free[process, stream]))
    return Trace.of(processes, spans)


def check_trace_events(document: Mapping[str, Any]) -> None:
    """Check the rules of Google's "Trace Event Format", and that events of a thread do not overlap."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    named: dict[str, set[tuple[int, int]]] = {"process_name": set(), "thread_name": set()}
    ends: dict[tuple[int, int], float] = {}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        place = (event["pid"], event["tid"])
        if event["ph"] == "M":
            assert isinstance(event["args"]["name"], str)
            named[event["name"]].add(place)
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert place in named["thread_name"]
        assert (event["pid"], 0) in named["process_name"]
        assert ends.get(place, 0.0) <= event["ts"] + 1e-6
        ends[place] = event["ts"] + event["dur"]


@given(traces())
def test_traces_follow_the_trace_event_format(trace: Trace) -> None:
    """Events follow the format, and each span is one complete event."""
    document = json.loads(json.dumps({"traceEvents": trace.events(), "displayTimeUnit": "ms"}))
    check_trace_events(document)
    assert sum(event["ph"] == "X" for event in document["traceEvents"]) == len(trace.spans)


@given(traces())
def test_traces_survive_json(trace: Trace) -> None:
    """A trace written and read as JSON is equal, with any names."""
    assert Trace.from_json(json.loads(json.dumps(trace.to_json()))) == trace


def test_a_written_trace_has_times_in_microseconds(tmp_path: Path) -> None:
    """A written trace has a named thread for each stream of a process, and times in microseconds."""
    spans = [(0, "compute", "mm", 0.0, 2e-3), (0, "network", "all-reduce", 2e-3, 3e-3), (1, "compute", "mm", 0.0, 1e-3)]
    Trace.of(["rank 0", "rank 1"], spans).write(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    check_trace_events(document)
    complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in complete] == [
        ("mm", 0.0, 2000.0),
        ("all-reduce", 2000.0, 1000.0),
        ("mm", 0.0, 1000.0),
    ]
    names = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["compute", "network", "compute"]
