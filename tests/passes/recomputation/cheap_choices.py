"""An oracle for searches: all choices of an assignment that cost less than some bound, whatever memory they take.

Nothing here is shared with the solvers. What all variables behind a prefix of a choice cost at least is known exactly
(bucket elimination; Dechter, 1999): a prefix is followed only where a choice that is cheap enough comes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from passes.solver.assignment import Assignment, Floats


@dataclass(frozen=True, slots=True)
class _Table:
    """Costs by the options of some variables, in ascending order of these: `costs[option, option, ...]`."""

    variables: tuple[int, ...]
    costs: Floats

    def of_last(self, choice: Sequence[int]) -> Floats:
        """The costs of each option of the last variable, where `choice` is of all before it."""
        return np.asarray(self.costs[tuple(choice[variable] for variable in self.variables[:-1])])

    def over(self, variables: Sequence[int]) -> Floats:
        """The costs, with an axis for each of some variables, which are a superset in ascending order."""
        return self.costs.reshape([self._size(variable) for variable in variables])

    def _size(self, variable: int) -> int:
        return self.costs.shape[self.variables.index(variable)] if variable in self.variables else 1


@dataclass(slots=True)
class _Bucket:
    """The tables whose last variable is one of a problem; and the least of their sum, by the variables before it."""

    known: list[_Table] = field(default_factory=list)
    ahead: list[_Table] = field(default_factory=list)
    least: _Table = field(default_factory=lambda: _Table((), np.zeros(())))

    def eliminate(self) -> None:
        tables = (*self.known, *self.ahead)
        variables = sorted({variable for table in tables for variable in table.variables})
        total = sum(table.over(variables) for table in tables)
        self.least = _Table(tuple(variables[:-1]), np.min(total, axis=-1))


def cheaper_than(problem: Assignment, cost: float) -> Iterator[tuple[int, ...]]:
    """All choices that cost less, in the order of their options."""
    buckets = _buckets(problem)

    def extend(choice: tuple[int, ...], least: float) -> Iterator[tuple[int, ...]]:
        if len(choice) == len(buckets):
            yield choice
            return
        bucket = buckets[len(choice)]
        before = bucket.least.costs[tuple(choice[variable] for variable in bucket.least.variables)]
        totals = least - before + sum(table.of_last(choice) for table in (*bucket.known, *bucket.ahead))
        for option in np.flatnonzero(totals < cost):
            yield from extend((*choice, int(option)), float(totals[option]))

    return extend((), sum(float(bucket.least.costs) for bucket in buckets if not bucket.least.variables))


def _buckets(problem: Assignment) -> list[_Bucket]:
    buckets = [_Bucket([_Table((variable,), costs)]) for variable, costs in enumerate(problem.costs)]
    for edge in problem.edges:
        table = edge.cost if edge.tail < edge.head else edge.cost.T
        ends = min(edge.tail, edge.head), max(edge.tail, edge.head)
        buckets[ends[1]].known.append(_Table(ends, table))
    for bucket in reversed(buckets):
        bucket.eliminate()
        if bucket.least.variables:
            buckets[bucket.least.variables[-1]].ahead.append(bucket.least)
    return buckets
