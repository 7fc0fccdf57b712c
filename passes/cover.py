"""What a plan does with each operator: split it, or run it whole on every rank, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir.plan import OperatorCoverage
from autoshard.rules.hub import hub
from passes.build_assignment import PlanningProblem
from passes.price import operator_name


def cover(planning: PlanningProblem, choice: Sequence[int]) -> tuple[OperatorCoverage, ...]:
    """The calls of a program, those of one operator on one source line together, the most expensive first.

    Args:
        planning: the problem.
        choice: one option per variable.
    """
    found: dict[tuple[str, str, bool, bool], list[float]] = {}
    for name, site in planning.space.sites.items():
        node = site.node
        if node is None or node.op != "call_function" or node.target is hub:
            continue
        strategy = planning.strategy(name, choice)
        is_split = any(item is not None for item in strategy.choices)
        key = (operator_name(node), node.meta.get("source", ""), site.rule is not None, is_split)
        found.setdefault(key, []).append(planning.prices.call_time(site, strategy))
    rows = [OperatorCoverage(*key, calls=len(times), time_s=sum(times)) for key, times in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.time_s))
