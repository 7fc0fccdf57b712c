"""The page of `plan.report`: one HTML file that opens without a network.

The template is `page.html.j2`; this module computes its drawings. Bars and the timeline are SVG with relative lengths,
so the page needs no script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, select_autoescape

from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import OperatorCoverage
from autoshard.ir.show import page_of
from autoshard.ir.text import format_bytes, format_time
from autoshard.ir.trace import Trace, TraceSpan
from autoshard.report.printer import (
    baseline_rows,
    figure_rows,
    in_words,
    lead_rows,
    notes,
    parameter_rows,
    running_lines,
    stage_rows,
    title,
)

WIDTH = 1000.0
"""Width of a drawing in SVG units."""

_NARROWEST = 0.5
"""Width in SVG units below which a span is narrow. Neighbouring narrow spans of the timeline are merged."""

_TASK = re.compile(r"\d+([FBIW])\d+")
_WORKS = {"F": "forward", "B": "backward", "I": "backward, of inputs", "W": "backward, of weights"}
"""Letter in the name of a stage's span ("F" in "1F0", a letter of `Work`) → the work in words."""

_MOST_OPERATORS = 50
"""The table of operators lists this many operators, the most expensive."""

_TEMPLATES = Environment(
    loader=PackageLoader("autoshard.report", ""),
    autoescape=select_autoescape(["j2"]),
    trim_blocks=True,
    lstrip_blocks=True,
)


class Piece(NamedTuple):
    """A rectangle in a bar or in a lane of the timeline.

    `left` and `width` are in SVG units, of which a drawing has `WIDTH`. `name` and `text` are the tooltip. `colour` is
    an index into the colours of the template.
    """

    left: float
    width: float
    name: str
    text: str
    colour: int


class Lane(NamedTuple):
    """One row of the timeline: a stream of a process. Its pieces are spans, or groups of neighbouring narrow spans."""

    name: str
    pieces: tuple[Piece, ...]


@page_of.register
def render_page(plan: Plan) -> str:
    """Return a plan as one page of HTML: a summary, the parts of time and memory, the timeline, and all specs."""
    predicted = plan.predicted
    return _TEMPLATES.get_template("page.html.j2").render(
        title=title(plan),
        lead=lead_rows(plan),
        lines=[*in_words(plan), *notes(plan), *running_lines(plan)],
        width=WIDTH,
        time=_bar(predicted.breakdown, format_time),
        memory=_bar(predicted.memory_breakdown, format_bytes),
        lanes=[] if predicted.timeline is None else lanes(predicted.timeline),
        works=[] if predicted.timeline is None else works(predicted.timeline),
        figures=[*((name, format_time(seconds)) for name, seconds in predicted.hidden.items()), *figure_rows(plan)],
        baselines=baseline_rows(plan),
        parameters=parameter_rows(plan.parameters),
        operators=[_operator_row(item) for item in plan.operators[:_MOST_OPERATORS]],
        others=max(0, len(plan.operators) - _MOST_OPERATORS),
        outputs=[(name, repr(spec)) for name, spec in plan.outputs.items() if not name.startswith("gradient ")],
        stages=stage_rows(plan) if plan.stages else [],
        nodes=_node_rows(plan),
    )


def _node_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Return (name, specs of operands, specs of results) for all nodes, stage by stage."""
    rows = [(name, _specs(node.inputs), _specs(node.outputs)) for name, node in plan.nodes.items()]
    for number, stage in enumerate(plan.stages):
        rows += [(f"stage {number}: {name}", taken, given) for name, taken, given in _node_rows(stage)]
    return rows


def _bar(parts: Mapping[str, float], text: Callable[[float], str]) -> tuple[Piece, ...]:
    shown = {name: value for name, value in parts.items() if value > 0}
    total = sum(shown.values()) or 1.0
    starts = accumulate(shown.values(), initial=0.0)
    return tuple(
        Piece(
            round(WIDTH * start / total, 3),
            round(WIDTH * value / total, 3),
            name,
            f"{text(value)} ({value / total:.1%})",
            colour,
        )
        for colour, (start, (name, value)) in enumerate(zip(starts, shown.items(), strict=False))
    )


def lanes(trace: Trace) -> tuple[Lane, ...]:
    """Return a lane for each stream of a timeline. Neighbouring spans that are too narrow to be seen share a piece.

    Example:
        >>> trace = Trace.of(["rank 0"], [(0, "compute", "mm", 0.0, 1.0), (0, "compute", "add", 1.0, 1.0001)])
        >>> [(piece.name, piece.width) for piece in lanes(trace)[0].pieces]
        [('mm', 999.9), ('add', 0.1)]
    """
    end = max((span.start_ns + span.duration_ns for span in trace.spans), default=0) or 1
    streams: dict[tuple[int, str], list[TraceSpan]] = {}
    for span in trace.spans:
        streams.setdefault((span.process, span.stream), []).append(span)
    colours = _colours(trace)
    return tuple(
        Lane(f"{trace.processes[process]}: {stream}", tuple(_pieces(spans, end, colours)))
        for (process, stream), spans in streams.items()
    )


def works(trace: Trace) -> tuple[Piece, ...]:
    """Return the legend of a pipeline's lanes: a piece with name and colour for each kind of work in the timeline.

    Example:
        >>> trace = Trace.of(["rank 0"], [(0, "compute", "0F0", 0.0, 1.0), (0, "compute", "0B0", 1.0, 3.0)])
        >>> [(piece.name, piece.colour) for piece in works(trace)]
        [('forward', 0), ('backward', 1)]
    """
    return tuple(Piece(0, 0, kind, "", colour) for kind, colour in _colours(trace).items() if kind in _WORKS.values())


def _colours(trace: Trace) -> dict[str, int]:
    return {kind: number for number, kind in enumerate(dict.fromkeys(map(_kind, trace.spans)))}


def _kind(span: TraceSpan) -> str:
    """Return the kind of a span, which decides its colour: the work of a stage, or else the stream."""
    found = _TASK.fullmatch(span.name)
    return span.stream if found is None else _WORKS[found[1]]


def _pieces(spans: Sequence[TraceSpan], end: int, colours: Mapping[str, int]) -> Iterable[Piece]:
    """Yield the pieces of a stream in order. Neighbouring narrow spans become one piece. `end` is in nanoseconds."""
    narrow: list[TraceSpan] = []
    for span in sorted(spans, key=lambda item: item.start_ns):
        is_narrow = WIDTH * span.duration_ns / end < _NARROWEST
        if narrow and not (is_narrow and WIDTH * (span.start_ns - narrow[0].start_ns) / end < _NARROWEST):
            yield _piece(narrow, end, colours)
            narrow = []
        if is_narrow:
            narrow.append(span)
        else:
            yield _piece([span], end, colours)
    if narrow:
        yield _piece(narrow, end, colours)


def _piece(spans: Sequence[TraceSpan], end: int, colours: Mapping[str, int]) -> Piece:
    start = spans[0].start_ns
    busy = sum(span.duration_ns for span in spans)
    last = spans[-1].start_ns + spans[-1].duration_ns
    name = spans[0].name if len(spans) == 1 else f"{len(spans)} operators from {spans[0].name}"
    text = f"{format_time(busy / 1e9)} from {format_time(start / 1e9)}"
    return Piece(
        round(WIDTH * start / end, 3), round(WIDTH * (last - start) / end, 3), name, text, colours[_kind(spans[0])]
    )


def _operator_row(item: OperatorCoverage) -> tuple[str, str, str, str, str, str]:
    done = "split" if item.is_split else "whole" if item.has_rule else "whole, no rule"
    times = (format_time(item.time_s), format_time(item.reshard_time_s))
    return (item.operator, item.source or "-", done, str(item.calls), *times)


def _specs(specs: Iterable[object]) -> str:
    return ", ".join(map(repr, specs))
