"""Message passing on a pairwise problem: a lower bound of its optimum, and choices near the optimum.

The algorithm is sequential tree-reweighted message passing (Kolmogorov, "Convergent Tree-Reweighted Message Passing for
Energy Minimization", IEEE PAMI 28(10), 2006, figure 3). Variables are visited in their order, which for programs is
program order, and then backwards. Each backward pass gives a bound that never falls while the costs stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from passes.solver.assignment import Assignment, Edge, Floats, MemoryRow


class Messages:
    """Message passing on one pairwise problem whose costs may be re-weighed between rounds."""

    def __init__(self, problem: Assignment) -> None:
        self._problem = problem
        self._cap = _more_than_any_choice(problem)
        self._base = [np.minimum(cost, self._cap) for cost in problem.costs]
        self._costs = self._base
        self._tables = self._capped_tables()
        self._base_tables = self._tables
        self._ends = [(min(edge.tail, edge.head), max(edge.tail, edge.head)) for edge in problem.edges]
        count = len(problem.costs)
        self._earlier: list[list[int]] = [[] for _ in range(count)]
        self._later: list[list[int]] = [[] for _ in range(count)]
        for number, (first, second) in enumerate(self._ends):
            self._later[first].append(number)
            self._earlier[second].append(number)
        self._barred: _Barred | None = None
        self._share = [1.0 / max(len(a), len(b), 1) for a, b in zip(self._earlier, self._later, strict=True)]
        self._forwards = _Vectors([table.shape[1] for table in self._tables])
        self._backwards = _Vectors([table.shape[0] for table in self._tables])
        self._forward, self._backward = self._forwards.each, self._backwards.each

    def weigh(self, rows: Mapping[int, tuple[MemoryRow, float]]) -> None:
        """Add `weight` seconds per byte of each memory row, by its point, to the costs; the messages stay.

        Forbidden options cost the most that any bytes can save in addition, so that they stay the dearest.
        """
        self._costs, self._tables = list(self._base), list(self._base_tables)
        weighed = [(row, weight) for row, weight in rows.values() if weight > 0.0]
        if not weighed:
            return
        if self._barred is None:
            self._barred = _Barred.of(self._base, self._base_tables, self._cap)
        most = sum(weight * _spread(row) for row, weight in weighed)
        self._barred.raise_by(most, self._costs, self._tables)
        for row, weight in weighed:
            for variable, sizes in row.variables.items():
                self._costs[variable] = self._costs[variable] + weight * sizes
            for number, sizes in row.edges.items():
                edge = self._problem.edges[number]
                self._tables[number] = self._tables[number] + weight * (sizes if edge.tail < edge.head else sizes.T)

    def iterate(self, times: int = 1) -> tuple[float, tuple[int, ...]]:
        """Run some forward and backward passes: the best bound of all, and the rounded choice of the last pass."""
        bound, choice = -np.inf, ()
        for left in reversed(range(times)):
            choice = self._round() if not left else ()
            self._pass_forward()
            bound = max(bound, self._pass_backward())
        return bound, choice

    def _capped_tables(self) -> list[Floats]:
        """The costs of each edge, with the earlier variable's options as rows; edges that share a table share the
        result.
        """
        made: dict[tuple[int, bool], Floats] = {}
        for edge in self._problem.edges:
            key = (id(edge.cost), edge.tail < edge.head)
            if key not in made:
                made[key] = np.minimum(_forward(edge), self._cap)
        return [made[id(edge.cost), edge.tail < edge.head] for edge in self._problem.edges]

    def _round(self) -> tuple[int, ...]:
        """A choice, variable by variable, given the choices of earlier variables and the messages of later ones."""
        choice: list[int] = []
        for variable, cost in enumerate(self._costs):
            for number in self._later[variable]:
                cost = cost + self._backward[number]
            for number in self._earlier[variable]:
                cost = cost + self._tables[number][choice[self._ends[number][0]]]
            choice.append(int(cost.argmin()))
        return tuple(choice)

    def _pass_forward(self) -> None:
        for variable, cost in enumerate(self._costs):
            later = self._later[variable]
            if not later:
                continue
            for number in later:
                cost = cost + self._backward[number]
            for number in self._earlier[variable]:
                cost = cost + self._forward[number]
            shared = self._share[variable] * cost
            for number in later:
                table = (shared - self._backward[number])[:, None] + self._tables[number]
                _least(table, 0, out=self._forward[number])
        self._forwards.from_zero()

    def _pass_backward(self) -> float:
        bound = 0.0
        for variable in reversed(range(len(self._costs))):
            earlier = self._earlier[variable]
            belief = self._costs[variable]
            for number in earlier:
                belief = belief + self._forward[number]
            for number in self._later[variable]:
                belief = belief + self._backward[number]
            share = self._share[variable]
            # # shares move on with the messages, even parts equal for all options; the rest stays in the bound
            if len(earlier) * share < 1:
                bound += (1 - len(earlier) * share) * float(_least(belief))
            shared = share * belief
            for number in earlier:
                _least(self._tables[number] + (shared - self._forward[number]), 1, out=self._backward[number])
        self._backwards.from_zero()
        return bound

    def improve(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Change one variable at a time while that lowers the weighed cost (iterated conditional modes)."""
        current = list(choice)
        changed = True
        while changed:
            changed = False
            for variable in range(len(current)):
                best = self._best_given_neighbours(variable, current)
                changed |= best != current[variable]
                current[variable] = best
        return tuple(current)

    def _best_given_neighbours(self, variable: int, choice: Sequence[int]) -> int:
        cost = self._given_neighbours(variable, choice, self._costs, self._tables)
        best = int(cost.argmin())
        return best if cost[best] < cost[choice[variable]] * (1 - 1e-12) else choice[variable]

    def costs_given_neighbours(self, variable: int, choice: Sequence[int]) -> Floats:
        """The unweighed cost of each option of `variable` while all others stay as in `choice`."""
        return self._given_neighbours(variable, choice, self._base, self._base_tables)

    def _given_neighbours(
        self, variable: int, choice: Sequence[int], costs: Sequence[Floats], tables: Sequence[Floats]
    ) -> Floats:
        cost = costs[variable]
        for number in self._earlier[variable]:
            cost = cost + tables[number][choice[self._ends[number][0]]]
        for number in self._later[variable]:
            cost = cost + tables[number][:, choice[self._ends[number][1]]]
        return cost


@dataclass(frozen=True, slots=True)
class _Barred:
    """The forbidden options and pairs.

    Args:
        options: variable to a mask of its forbidden options, if there are any.
        pairs: edge to a mask of its forbidden pairs, if there are any; edges that share a table share the mask.
    """

    options: Mapping[int, np.ndarray]
    pairs: Mapping[int, np.ndarray]

    @classmethod
    def of(cls, costs: Sequence[Floats], tables: Sequence[Floats], cap: float) -> _Barred:
        """Options and pairs with cost `cap`."""
        known: dict[int, np.ndarray] = {}
        for table in tables:
            if id(table) not in known:
                known[id(table)] = table >= cap
        options = {variable: cost >= cap for variable, cost in enumerate(costs)}
        pairs = {number: known[id(table)] for number, table in enumerate(tables)}
        return cls(*({key: flags for key, flags in of.items() if flags.any()} for of in (options, pairs)))

    def raise_by(self, most: float, costs: list[Floats], tables: list[Floats]) -> None:
        """Add `most` to their costs; shared tables without forbidden pairs stay shared."""
        for variable, flags in self.options.items():
            costs[variable] = costs[variable] + most * flags
        for number, flags in self.pairs.items():
            tables[number] = tables[number] + most * flags


def _spread(row: MemoryRow) -> float:
    """The most bytes by which two choices can differ in a row."""
    return sum(float(np.ptp(sizes)) for sizes in (*row.variables.values(), *row.edges.values()) if sizes.size)


_least = np.minimum.reduce
"""The least element, along an axis or of a vector; `ndarray.min` says the same more slowly."""


class _Vectors:
    """Messages along edges, one after another in one array."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = np.array(lengths, dtype=np.intp)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._all = np.zeros(int(self._lengths.sum()))
        self.each = np.split(self._all, self._starts[1:])
        """Views, which write through to the array."""

    def from_zero(self) -> None:
        """Subtract from each message its least element, which keeps messages small and changes no bound or choice."""
        if len(self._all):
            self._all -= np.repeat(np.minimum.reduceat(self._all, self._starts), self._lengths)


def _forward(edge: Edge) -> Floats:
    """The costs of an edge with the earlier variable's options as rows."""
    return edge.cost if edge.tail < edge.head else edge.cost.T


def _more_than_any_choice(problem: Assignment) -> float:
    """A finite cost in place of an infinite one: above the cost of every allowed choice."""
    tables = [*problem.costs, *(edge.cost for edge in problem.edges)]
    finite = (table[np.isfinite(table)] for table in tables)
    return 2.0 * sum(float(costs.max()) for costs in finite if costs.size) or 1.0
