"""The report of `autoshard doctor MODEL`: operators that run whole on every device, their lines and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import OperatorCoverage
from autoshard.ir.text import format_time
from autoshard.rules import inferred_operators

_LEAST_SHARE = 1e-3
"""Smallest share of the step's time for which an operator replicated by choice gets a row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operator on one line of the user's code.

    Args:
        kind: "without rule", "replicated" or "inferred rule".
        share: the operator's share of the step's predicted time, including the resharding of its operands.
    """

    kind: str
    item: OperatorCoverage
    share: float


def coverage_rows(plan: Plan) -> tuple[Row, ...]:
    """Return a row for each operator without a sharding rule, with an inferred rule, or replicated by the plan.

    A replicated operator has a rule, but runs whole on every rank. It has a row only if it takes at least
    `_LEAST_SHARE` of the step's time.
    """
    return tuple(row for row in _rows(plan) if row.kind != "replicated" or row.share >= _LEAST_SHARE)


def _rows(plan: Plan) -> Iterator[Row]:
    for kind in ("without rule", "replicated"):
        yield from (Row(kind, item, _share(item, plan)) for item in plan.coverage[kind])
    inferred = inferred_operators()
    found = (item for item in plan.operators if item.has_rule and item.operator in inferred)
    yield from (Row("inferred rule", item, _share(item, plan)) for item in found)


def _share(item: OperatorCoverage, plan: Plan) -> float:
    return (item.time_s + item.reshard_time_s) / plan.predicted.step_time_s if plan.predicted.step_time_s else 0.0


def coverage_json(plan: Plan) -> dict[str, Any]:
    """Return the rows and the numbers of calls as JSON data; shares are of the step's predicted time."""
    return {
        "step_time_s": plan.predicted.step_time_s,
        "operators": [{"kind": row.kind, "share": row.share, **asdict(row.item)} for row in coverage_rows(plan)],
        "split_calls": sum(item.calls for item in plan.coverage["split"]),
        "replicated_calls": sum(item.calls for item in plan.coverage["replicated"]),
        "calls_without_rule": sum(item.calls for item in plan.coverage["without rule"]),
    }


def coverage_summary(plan: Plan) -> str:
    """Return one sentence: how many calls of a step are split, replicated by choice, or without a rule."""
    counts = {kind: sum(item.calls for item in items) for kind, items in plan.coverage.items()}
    shares = {kind: sum(_share(item, plan) for item in items) for kind, items in plan.coverage.items()}
    return (
        f"A step on {plan.mesh} has {sum(counts.values())} calls: {counts['split']} are split, "
        f"{counts['replicated']} run whole on every device by choice ({shares['replicated']:.1%} of "
        f"{format_time(plan.predicted.step_time_s)}) and {counts['without rule']} for want of a sharding rule "
        f"({shares['without rule']:.1%})."
    )


def coverage_table(rows: tuple[Row, ...]) -> Table:
    """Return the rows as a table for the terminal, in which long operator names and lines wrap."""
    names = ("", "operator", "line", "calls", "time", "reshards", "share")
    table = Table(*names, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
        column.no_wrap = column.header not in ("operator", "line")
    for row in rows:
        item = row.item
        times = (format_time(item.time_s), format_time(item.reshard_time_s))
        table.add_row(row.kind, item.operator, item.source or "-", str(item.calls), *times, f"{row.share:.1%}")
    return table
