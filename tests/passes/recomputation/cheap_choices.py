"""An oracle for searches: the choices of an assignment from the cheapest on, whatever memory they take.

Nothing here is shared with the solvers. Variables are eliminated one by one (bucket elimination; Dechter, 1999), each
time the one whose table is smallest. Then they are decided in the opposite order, best first: what a choice of some of
them costs at least, whatever the others are, is known exactly, so what is not followed is no cheaper than what is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from passes.solver.assignment import Assignment, Floats


@dataclass(frozen=True, slots=True)
class _Table:
    """Costs by the options of some variables, in ascending order of these: `costs[option, option, ...]`."""

    variables: tuple[int, ...]
    costs: Floats

    def over(self, variables: Sequence[int]) -> Floats:
        """The costs, with an axis for each of some variables, which are a superset in ascending order."""
        sizes = dict(zip(self.variables, self.costs.shape, strict=True))
        return self.costs.reshape([sizes.get(variable, 1) for variable in variables])

    def line(self, variable: int, choice: Mapping[int, int]) -> Floats:
        """The costs by the option of one variable, where all others are chosen."""
        return np.asarray(self.costs[tuple(slice(None) if v == variable else choice[v] for v in self.variables)])


_Part = tuple[float, tuple[int, ...]]
"""Options of the variables that are decided first, and the cost of the cheapest choice that begins so."""


def cheapest_first(problem: Assignment) -> Iterator[tuple[int, ...]]:
    """All choices of finite cost, the cheapest first."""
    deciding = list(reversed(_eliminated(problem)))
    order = [variable for variable, _ in deciding]
    ordinal = count()
    heap: list[tuple[float, int, int, tuple[int, ...], Iterator[_Part]]] = []

    def extended(options: tuple[int, ...], cost: float) -> Iterator[_Part]:
        """One variable more, the cheapest first."""
        variable, table = deciding[len(options)]
        line = table.line(variable, dict(zip(order, options, strict=False)))
        for option in np.argsort(line, kind="stable"):
            if not math.isfinite(line[option]):
                return
            yield cost + float(line[option] - line.min()), (*options, int(option))

    def offer(parts: Iterator[_Part]) -> None:
        """Follow the next of some parts, if there is one."""
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
    """Variables in the order of their elimination, each with the sum of the tables that it was in."""
    tables = [_Table((variable,), costs) for variable, costs in enumerate(problem.costs)]
    tables += [_of_edge(edge.tail, edge.head, edge.cost) for edge in problem.edges]
    left, found = set(range(len(problem.costs))), []
    while left:
        variable = min(left, key=lambda item: (_size_around(problem, tables, item), item))
        inside = [table for table in tables if variable in table.variables]
        around = sorted({item for table in inside for item in table.variables})
        total = _Table(tuple(around), sum((table.over(around) for table in inside), np.zeros([1] * len(around))))
        found.append((variable, total))
        place = around.index(variable)
        rest = _Table((*around[:place], *around[place + 1 :]), total.costs.min(axis=place))
        tables = [*(table for table in tables if variable not in table.variables), rest]
        left.discard(variable)
    return found


def _of_edge(tail: int, head: int, costs: Floats) -> _Table:
    return _Table((tail, head), costs) if tail < head else _Table((head, tail), costs.T)


def _size_around(problem: Assignment, tables: Sequence[_Table], variable: int) -> int:
    """Entries of the table that the elimination of a variable makes."""
    around = {item for table in tables if variable in table.variables for item in table.variables}
    return math.prod(len(problem.costs[item]) for item in around)
