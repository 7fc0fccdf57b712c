"""A reference for searches: the choices of an assignment in ascending cost, whatever their memory.

The module shares no code with the solvers. Variables are eliminated one by one (bucket elimination; Dechter, 1999),
each time the variable with the smallest table. Variables are then decided in the opposite order, best first. The least
cost of a partial choice is known exactly, so choices come in ascending cost.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from passes.solver.assignment import Assignment, Edge, Floats


@dataclass(frozen=True, slots=True)
class _Table:
    """Costs by the options of some variables, in ascending order of variables: `costs[option, option, ...]`."""

    variables: tuple[int, ...]
    costs: Floats

    def over(self, variables: Sequence[int]) -> Floats:
        """Return the costs with an axis for each variable of an ascending superset."""
        sizes = dict(zip(self.variables, self.costs.shape, strict=True))
        return self.costs.reshape([sizes.get(variable, 1) for variable in variables])

    def line(self, variable: int, choice: Mapping[int, int]) -> Floats:
        """Return the costs by the option of one variable, with all other variables chosen."""
        return np.asarray(self.costs[tuple(slice(None) if v == variable else choice[v] for v in self.variables)])


_Part = tuple[float, tuple[int, ...]]
"""Options of the first decided variables, and the cost of the cheapest full choice with these options."""


def cheapest_first(problem: Assignment) -> Iterator[tuple[int, ...]]:
    """All choices of finite cost, the cheapest first."""
    allowed = [np.flatnonzero(np.isfinite(cost)) for cost in problem.costs]
    if not all(map(len, allowed)):
        return
    for choice in _cheapest_first(_without_forbidden(problem)):
        yield tuple(int(options[option]) for options, option in zip(allowed, choice, strict=True))


def largest_table(problem: Assignment) -> int:
    """The number of entries of the largest table that `cheapest_first` makes for an assignment."""
    return max(entries for _, _, entries in _order(_without_forbidden(problem)))


def _without_forbidden(problem: Assignment) -> Assignment:
    """Remove the options without a finite cost from the assignment."""
    keep = [np.isfinite(cost) for cost in problem.costs]
    edges = (Edge(edge.tail, edge.head, edge.cost[keep[edge.tail]][:, keep[edge.head]]) for edge in problem.edges)
    return Assignment(tuple(cost[flags] for cost, flags in zip(problem.costs, keep, strict=True)), tuple(edges))


def _cheapest_first(problem: Assignment) -> Iterator[tuple[int, ...]]:
    deciding = list(reversed(_eliminated(problem)))
    order = [variable for variable, _ in deciding]
    ordinal = count()
    heap: list[tuple[float, int, int, tuple[int, ...], Iterator[_Part]]] = []

    def extended(options: tuple[int, ...], cost: float) -> Iterator[_Part]:
        """Yield partial choices with one more decided variable, the cheapest first."""
        variable, table = deciding[len(options)]
        line = table.line(variable, dict(zip(order, options, strict=False)))
        for option in np.argsort(line, kind="stable"):
            if not math.isfinite(line[option]):
                return
            yield cost + float(line[option] - line.min()), (*options, int(option))

    def offer(parts: Iterator[_Part]) -> None:
        """Add the next item of `parts` to the queue; do nothing at the end of `parts`."""
        for cost, options in parts:
            heapq.heappush(heap, (cost, -len(options), next(ordinal), options, parts))
            return

    offer(extended((), 0.0))
    while heap:
        cost, _, _, options, siblings = heapq.heappop(heap)
        offer(siblings)
        if len(options) == len(order):
            yield tuple(options[place] for place in np.argsort(order))
        else:
            offer(extended(options, cost))


def _eliminated(problem: Assignment) -> list[tuple[int, _Table]]:
    """Return variables in the order of elimination, each with the sum of its tables."""
    tables = [_Table((variable,), costs) for variable, costs in enumerate(problem.costs)]
    tables += [_of_edge(edge.tail, edge.head, edge.cost) for edge in problem.edges]
    found = []
    for variable, around, _ in _order(problem):
        inside = [table for table in tables if variable in table.variables]
        total = _Table(around, sum((table.over(around) for table in inside), np.zeros([1] * len(around))))
        found.append((variable, total))
        place = around.index(variable)
        rest = _Table((*around[:place], *around[place + 1 :]), total.costs.min(axis=place))
        tables = [*(table for table in tables if variable not in table.variables), rest]
    return found


def _order(problem: Assignment) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Yield variables in the order of elimination, each with the variables and the entries of its table."""
    tables = [{variable} for variable in range(len(problem.costs))]
    tables += [{edge.tail, edge.head} for edge in problem.edges]
    left = set(range(len(problem.costs)))
    while left:
        around = {item: set[int]().union(*(table for table in tables if item in table)) for item in left}
        sizes = {item: math.prod(len(problem.costs[other]) for other in others) for item, others in around.items()}
        variable = min(left, key=lambda item: (sizes[item], item))
        yield variable, tuple(sorted(around[variable])), sizes[variable]
        tables = [*(table for table in tables if variable not in table), around[variable] - {variable}]
        left.discard(variable)


def _of_edge(tail: int, head: int, costs: Floats) -> _Table:
    return _Table((tail, head), costs) if tail < head else _Table((head, tail), costs.T)
