"""Message passing on a pairwise problem: a lower bound of its optimum, and choices near the optimum.

The problem has costs of single options and of pairs of options, without memory rows. The method is sequential
tree-reweighted message passing (Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization", IEEE
PAMI 28(10), 2006, figure 3). Each pass visits the variables in program order and back. The bound after a pass never
falls while the costs stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from passes.solver.assignment import Assignment, Edge, Floats, MemoryRow


class Messages:
    """The messages of one problem, whose costs include bytes of memory rows at a price that may change (`weigh`).

    Costs, tables of pairs and messages have entries only for options of finite cost. Choices in arguments and results
    number the options as the problem does.
    """

    def __init__(self, problem: Assignment) -> None:
        self._problem = problem
        self._cap = _more_than_any_choice(problem)
        self._kept = _allowed(problem)
        self._base = [np.minimum(cost[kept], self._cap) for cost, kept in zip(problem.costs, self._kept, strict=True)]
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
        self._raised = _RaisedCosts(0.0, self._base, self._base_tables)
        self._rows: dict[int, _AllowedRow] = {}
        self._share = [1.0 / max(len(a), len(b), 1) for a, b in zip(self._earlier, self._later, strict=True)]
        self._forwards = _Vectors([table.shape[1] for table in self._tables])
        self._backwards = _Vectors([table.shape[0] for table in self._tables])
        self._forward, self._backward = self._forwards.each, self._backwards.each

    def weigh(self, rows: Mapping[int, tuple[MemoryRow, float]]) -> None:
        """Set the costs to the problem's costs plus weight times bytes of the given rows. Messages stay unchanged.

        A finite cost stands in for infinity. It is raised if bytes could otherwise make forbidden pairs cheaper than
        allowed pairs.

        Args:
            rows: program point to its memory row and weight, in seconds per byte. Rows of all other points have no
                weight.
        """
        weighed = [(self._allowed_row(row), weight) for row, weight in rows.values() if weight > 0.0]
        if not weighed:
            self._costs, self._tables = list(self._base), list(self._base_tables)
            return
        most = sum(weight * row.spread for row, weight in weighed)
        if most > self._raised.raised_by:
            self._raised = _RaisedCosts.of(self._base, self._base_tables, self._cap, _FURTHER * most)
        self._costs, self._tables = list(self._raised.costs), list(self._raised.tables)
        for row, weight in weighed:
            for variable, sizes in row.variables.items():
                self._costs[variable] = self._costs[variable] + weight * sizes
            for number, sizes in row.edges.items():
                self._tables[number] = self._tables[number] + weight * sizes

    def _allowed_row(self, row: MemoryRow) -> _AllowedRow:
        """Return a memory row restricted to options of finite cost; results are cached by the identity of `row`."""
        if id(row) not in self._rows:
            variables = {variable: sizes[self._kept[variable]] for variable, sizes in row.variables.items()}
            edges = {number: self._table(self._problem.edges[number], sizes) for number, sizes in row.edges.items()}
            sizes = (*variables.values(), *edges.values())
            self._rows[id(row)] = _AllowedRow(row, variables, edges, sum(float(np.ptp(s)) for s in sizes if s.size))
        return self._rows[id(row)]

    def _table(self, edge: Edge, costs: Floats) -> Floats:
        """Return an edge's `costs` of allowed options, [earlier variable's options, later variable's options]."""
        first, second = self._kept[min(edge.tail, edge.head)], self._kept[max(edge.tail, edge.head)]
        table = costs if edge.tail < edge.head else costs.T
        return table if table.shape == (len(first), len(second)) else table[np.ix_(first, second)]

    def iterate(self, times: int = 1) -> tuple[float, tuple[int, ...]]:
        """Pass messages forward and back `times` times.

        Returns:
            The best lower bound of the optimum, in seconds, and a choice that is rounded before the last pass.
        """
        bound, choice = -np.inf, ()
        for left in reversed(range(times)):
            choice = self._original_options(self._round()) if not left else ()
            self._pass_forward()
            bound = max(bound, self._pass_backward())
        return bound, choice

    def _capped_tables(self) -> list[Floats]:
        """Return each edge's costs, with a finite number in place of infinity.

        Edges with equal tables share one array.
        """
        made: dict[tuple[int, ...], Floats] = {}

        def capped(edge: Edge) -> Floats:
            key = (id(edge.cost), edge.tail < edge.head, id(self._kept[edge.tail]), id(self._kept[edge.head]))
            if key not in made:
                made[key] = np.minimum(self._table(edge, edge.cost), self._cap)
            return made[key]

        return [capped(edge) for edge in self._problem.edges]

    def _original_options(self, choice: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(kept[option]) for kept, option in zip(self._kept, choice, strict=True))

    def _allowed_index(self, variable: int, option: int) -> int:
        return int(np.searchsorted(self._kept[variable], option))

    def _round(self) -> tuple[int, ...]:
        """Return a choice of allowed options.

        In program order, each variable takes its cheapest option, given the earlier choices and the messages from
        later variables.
        """
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
            # one share of the belief moves on with the message to each earlier variable; the rest stays in the bound
            if len(earlier) * share < 1:
                bound += (1 - len(earlier) * share) * float(_least(belief))
            shared = share * belief
            for number in earlier:
                _least(self._tables[number] + (shared - self._forward[number]), 1, out=self._backward[number])
        self._backwards.from_zero()
        return bound

    def improve(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Return `choice` after changes of single options, until none makes it cheaper (iterated conditional modes).

        Costs include bytes at their weights.
        """
        current = [self._allowed_index(variable, option) for variable, option in enumerate(choice)]
        changed = True
        while changed:
            changed = False
            for variable in range(len(current)):
                best = self._best_given_neighbours(variable, current)
                changed |= best != current[variable]
                current[variable] = best
        return self._original_options(current)

    def _best_given_neighbours(self, variable: int, choice: Sequence[int]) -> int:
        cost = self._given_neighbours(variable, choice, self._costs, self._tables)
        best = int(cost.argmin())
        return best if cost[best] < cost[choice[variable]] * (1 - 1e-12) else choice[variable]

    def costs_given_neighbours(self, variable: int, choice: Sequence[int]) -> Floats:
        """Return the cost of each option of `variable` if all other variables take `choice`, in seconds, [options].

        Costs do not include bytes. A forbidden option costs infinity; a forbidden pair adds a large finite cost.
        """
        allowed = list(choice)
        for number in (*self._earlier[variable], *self._later[variable]):
            for end in self._ends[number]:
                allowed[end] = self._allowed_index(end, choice[end])
        costs = np.full(len(self._problem.costs[variable]), np.inf)
        costs[self._kept[variable]] = self._given_neighbours(variable, allowed, self._base, self._base_tables)
        return costs

    def _given_neighbours(
        self, variable: int, choice: Sequence[int], costs: Sequence[Floats], tables: Sequence[Floats]
    ) -> Floats:
        cost = costs[variable]
        for number in self._earlier[variable]:
            cost = cost + tables[number][choice[self._ends[number][0]]]
        for number in self._later[variable]:
            cost = cost + tables[number][:, choice[self._ends[number][1]]]
        return cost


_FURTHER = 4.0
"""Factor on the needed increase of the costs of forbidden pairs, so that a second increase is seldom needed."""


@dataclass(frozen=True, slots=True)
class _RaisedCosts:
    """Costs and tables of pairs, with a higher finite stand-in for infinity.

    Forbidden entries cost `raised_by` seconds more than the cap, which stood in for infinity before. Arrays that
    variables or edges shared before are shared here too.
    """

    raised_by: float
    costs: Sequence[Floats]
    tables: Sequence[Floats]

    @classmethod
    def of(cls, costs: Sequence[Floats], tables: Sequence[Floats], cap: float, most: float) -> _RaisedCosts:
        """Return costs and tables in which each entry of `cap` seconds or more is raised by `most` seconds."""
        known: dict[int, Floats] = {}
        for table in (*costs, *tables):
            if id(table) not in known:
                flags = table >= cap
                known[id(table)] = table + most * flags if flags.any() else table
        return cls(most, [known[id(cost)] for cost in costs], [known[id(table)] for table in tables])


_least = np.minimum.reduce
"""The minimum of an array along an axis, faster than `ndarray.min`."""


class _Vectors:
    """One array with the messages of all edges; each edge's message is a vector in it."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = np.array(lengths, dtype=np.intp)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._all = np.zeros(int(self._lengths.sum()))
        self.each = np.split(self._all, self._starts[1:])
        """Views into the array, one for each edge; writing into a view writes into the array."""

    def from_zero(self) -> None:
        """Subtract from each message its least element. Messages stay small, and bounds and choices stay the same."""
        if len(self._all):
            self._all -= np.repeat(np.minimum.reduceat(self._all, self._starts), self._lengths)


@dataclass(frozen=True, slots=True)
class _AllowedRow:
    """A memory row (`MemoryRow`) without the options of infinite cost.

    Args:
        row: the memory row. The reference keeps its `id`, by which results are cached, from being used again.
        variables: index of a variable to the bytes of its options, [options].
        edges: index of an edge to the bytes of its pairs, [earlier variable's options, later variable's options].
        spread: the most bytes by which two choices can differ in this row.
    """

    row: MemoryRow
    variables: Mapping[int, Floats]
    edges: Mapping[int, Floats]
    spread: float


def _allowed(problem: Assignment) -> list[np.ndarray]:
    """Return for each variable the indices of its options of finite cost; if it has none, of all options.

    Equal results share memory.
    """
    made: dict[tuple[int, bytes], np.ndarray] = {}

    def allowed(cost: Floats) -> np.ndarray:
        flags = np.isfinite(cost)
        flags = flags if flags.any() else ~flags
        return made.setdefault((len(cost), flags.tobytes()), np.flatnonzero(flags))

    return [allowed(cost) for cost in problem.costs]


def _more_than_any_choice(problem: Assignment) -> float:
    """Return a finite number of seconds, in place of infinity: more than the cost of every allowed choice."""
    tables = [*problem.costs, *(edge.cost for edge in problem.edges)]
    finite = (table[np.isfinite(table)] for table in tables)
    return 2.0 * sum(float(costs.max()) for costs in finite if costs.size) or 1.0
