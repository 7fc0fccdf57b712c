"""Report for each operator whether a plan splits its calls or runs them whole on every rank, and the calls' seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from autoshard.ir.plan_parts import OperatorCoverage
from autoshard.rules.fan_out import fan_out
from passes.planning.build_assignment import PlanningProblem
from passes.strategies.enumerate_strategies import needs_of
from passes.strategies.operator_names import operator_name


def cover(planning: PlanningProblem, choice: Sequence[int]) -> tuple[OperatorCoverage, ...]:
    """Return a summary of a plan's calls for each operator and source line, the summary with the most seconds first.

    Calls that the plan splits and calls that run whole on every rank have separate summaries.
    """
    reshards = _reshard_times(planning, choice)
    runs = planning.site_runs()
    found: dict[_Key, list[tuple[int, float, float]]] = {}
    for name, site in planning.space.sites.items():
        node = site.node
        if node is None or node.op != "call_function" or node.target is fan_out:
            continue
        strategy = planning.strategy(name, choice)
        is_split = any(item is not None for item in strategy.choices)
        key = (operator_name(node), node.meta.get("source", ""), site.rule is not None, is_split)
        calls = runs[name]
        call_s = calls * planning.prices.call_time(site, strategy)
        found.setdefault(key, []).append((calls, call_s, reshards.get(name, 0.0)))
    return _summed(found)


def cover_stages(stages: Iterable[Sequence[OperatorCoverage]], ranks: int) -> tuple[OperatorCoverage, ...]:
    """Return the summary of a plan's calls from the summaries of its stages, which lie on `ranks` pipeline ranks.

    Calls of all stages are counted, and their seconds are means over ranks.
    """
    found: dict[_Key, list[tuple[int, float, float]]] = {}
    for row in chain.from_iterable(stages):
        key = (row.operator, row.source, row.has_rule, row.is_split)
        found.setdefault(key, []).append((row.calls, row.time_s / ranks, row.reshard_time_s / ranks))
    return _summed(found)


_Key = tuple[str, str, bool, bool]
"""Operator, source line, and whether the calls have a sharding rule and are split."""


def _summed(found: Mapping[_Key, Sequence[tuple[int, float, float]]]) -> tuple[OperatorCoverage, ...]:
    rows = [OperatorCoverage(*key, *map(sum, zip(*parts, strict=True))) for key, parts in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.time_s - row.reshard_time_s))


def _reshard_times(planning: PlanningProblem, choice: Sequence[int]) -> dict[str, float]:
    """Return the seconds per step of the reshards of a site's operands, by the site's name."""
    space, times = planning.space, dict[str, float]()
    runs = planning.link_runs()
    for index, link in enumerate(space.links):
        tail, head = space.sites[link.tail], space.sites[link.head]
        source = planning.strategy(link.tail, choice).outputs[link.result]
        target = needs_of(head, link)[choice[planning.classes[link.head]]]
        if source != target:
            table = planning.prices.reshard_table(tail.results[link.result], (source,), (target,))
            times[link.head] = times.get(link.head, 0.0) + runs[index] * float(table[0, 0])
    return times
