"""Make an assignment smaller without losing its optimum.

Two exact reductions, after Scholz and Eckstein ("Register Allocation for Irregular Architectures", 2002), applied
until nothing changes. Neighbours are variables that share an edge.

1. *Dominated options.* Option `i` of a variable is removed if another option `j` costs no more, and needs no more
   memory in any row. This must hold for each option alone, and for each option together with every option of every
   neighbour. Option `i` is also removed if it is forbidden, alone or with every option of a neighbour, while another
   option is allowed.
2. *Elimination.* A variable is removed if no memory row mentions it and it has at most two neighbours. For each pair
   of options of two neighbours, the variable's best option is known. Its cost moves onto the edge between the
   neighbours. With one neighbour, the cost moves onto the neighbour's own cost; with none, into a constant.
   `Reduced.expand` restores eliminated variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from passes.solver.assignment import Assignment, Edge, Floats, MemoryRow

_MAX_TABLE = 40_000_000
"""Elimination builds tables of at most this many entries: options of a variable times options of both neighbours."""

_Decide = Callable[[list[int]], int]
"""Function that takes the options of all variables decided so far, and returns the option of one more variable."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A reduced assignment, which may have no variables.

    The original optimum is its optimum plus `constant` seconds.
    """

    problem: Assignment
    constant: float
    _kept: tuple[int, ...]
    _options: tuple[np.ndarray, ...]
    _eliminated: tuple[tuple[int, _Decide], ...]

    def expand(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Return a choice for the original assignment, from a choice for the reduced one.

        Each eliminated variable takes its best option.
        """
        full = [0] * len(self._options)
        for variable, option in zip(self._kept, choice, strict=True):
            full[variable] = int(self._options[variable][option])
        for variable, decide in reversed(self._eliminated):
            full[variable] = decide(full)
        return tuple(full)


def reduce_assignment(problem: Assignment) -> Reduced:
    """Return `problem` without dominated options, and without variables that have few neighbours and need no memory."""
    state = _State.of(problem)
    queue = set(range(len(problem.costs)))
    while queue:
        variable = min(queue, key=lambda item: (len(state.neighbours[item]), item))
        queue.discard(variable)
        if variable in state.gone:
            continue
        touched = set(state.neighbours[variable])
        if state.drop_dominated(variable):
            queue |= touched
        if state.eliminate(variable):
            queue |= touched
    return state.result(problem.limit)


@dataclass(slots=True)
class _State:
    """The assignment during its reduction, changed in place.

    Args:
        tables: costs of pairs in seconds, by (smaller variable, larger variable).
        options: original indices of each variable's remaining options.
        row_variables, row_tables, row_constants: for each memory row, its bytes by variable, its bytes by (smaller
            variable, larger variable), and its constant bytes.
        pinned: the variables that a memory row mentions.
        gone: the eliminated variables.
        constant: seconds of eliminated variables without neighbours.
        eliminated: each eliminated variable, and the function that decides it, in order of elimination.
    """

    costs: list[Floats]
    tables: dict[tuple[int, int], Floats]
    neighbours: list[set[int]]
    options: list[np.ndarray]
    row_variables: list[dict[int, Floats]]
    row_tables: list[dict[tuple[int, int], Floats]]
    row_constants: list[float]
    pinned: set[int]
    gone: set[int] = field(default_factory=set)
    constant: float = 0.0
    eliminated: list[tuple[int, _Decide]] = field(default_factory=list)

    @classmethod
    def of(cls, problem: Assignment) -> _State:
        neighbours: list[set[int]] = [set() for _ in problem.costs]
        tables: dict[tuple[int, int], Floats] = {}
        for edge in problem.edges:
            key, table = _ordered(edge.tail, edge.head, edge.cost)
            tables[key] = tables[key] + table if key in tables else table
            neighbours[edge.tail].add(edge.head)
            neighbours[edge.head].add(edge.tail)
        row_tables = [_row_tables(row, problem.edges) for row in problem.rows]
        pinned = {variable for row in problem.rows for variable in row.variables}
        pinned |= {variable for tables_of_row in row_tables for key in tables_of_row for variable in key}
        return cls(
            costs=[cost.copy() for cost in problem.costs],
            tables=tables,
            neighbours=neighbours,
            options=[np.arange(len(cost)) for cost in problem.costs],
            row_variables=[dict(row.variables) for row in problem.rows],
            row_tables=row_tables,
            row_constants=[row.constant for row in problem.rows],
            pinned=pinned,
        )

    def table(self, first: int, second: int) -> Floats:
        """Return the costs of pairs of options, in seconds, [options of `first`, options of `second`]."""
        return self.tables[first, second] if first < second else self.tables[second, first].T

    def add_table(self, first: int, second: int, table: Floats) -> None:
        key, table = _ordered(first, second, table)
        self.tables[key] = self.tables[key] + table if key in self.tables else table
        self.neighbours[first].add(second)
        self.neighbours[second].add(first)

    def drop_dominated(self, variable: int) -> bool:
        allowed = self._allowed(variable)
        if allowed.any() and not allowed.all():
            self._keep_options(variable, np.flatnonzero(allowed))
            self.drop_dominated(variable)
            return True
        if len(self.costs[variable]) == 1:
            return False
        columns = [self.costs[variable][:, None]]
        columns += [self.table(variable, other) for other in sorted(self.neighbours[variable])]
        for variables, tables in zip(self.row_variables, self.row_tables, strict=True):
            if variable in variables:
                columns.append(variables[variable][:, None])
            columns += [t if key[0] == variable else t.T for key, t in tables.items() if variable in key]
        keep = _undominated(np.concatenate(columns, axis=1))
        if len(keep) == len(self.options[variable]):
            return False
        self._keep_options(variable, keep)
        return True

    def _allowed(self, variable: int) -> np.ndarray:
        """Return a boolean array [options], False for each option of `variable` that no choice of finite cost can have.

        Such an option is forbidden alone, or with every option of one neighbour.
        """
        allowed = np.isfinite(self.costs[variable])
        for other in self.neighbours[variable]:
            allowed = allowed & np.isfinite(self.table(variable, other)).any(axis=1)
        return allowed

    def _keep_options(self, variable: int, keep: np.ndarray) -> None:
        self.costs[variable] = self.costs[variable][keep]
        self.options[variable] = self.options[variable][keep]
        for key in [key for key in self.tables if variable in key]:
            self.tables[key] = _take(self.tables[key], key, variable, keep)
        for variables, tables in zip(self.row_variables, self.row_tables, strict=True):
            if variable in variables:
                variables[variable] = variables[variable][keep]
            for key in [key for key in tables if variable in key]:
                tables[key] = _take(tables[key], key, variable, keep)

    def eliminate(self, variable: int) -> bool:
        """Remove `variable` and move its cost to its neighbours; return whether this was done.

        It is not done if a memory row has the variable, if it has more than two neighbours, or if its table is too
        large.
        """
        others = sorted(self.neighbours[variable])
        if variable in self.pinned or len(others) > 2:
            return False
        if len(others) == 2 and np.prod([len(self.costs[item]) for item in (variable, *others)]) > _MAX_TABLE:
            return False
        (self._eliminate_alone, self._eliminate_leaf, self._eliminate_between)[len(others)](variable, *others)
        for other in others:
            self.neighbours[other].discard(variable)
            self.tables.pop((min(variable, other), max(variable, other)))
        self.neighbours[variable] = set()
        self.gone.add(variable)
        return True

    def _eliminate_alone(self, variable: int) -> None:
        best = int(np.argmin(self.costs[variable]))
        self.constant += float(self.costs[variable][best])
        self._record(variable, lambda _: best)

    def _eliminate_leaf(self, variable: int, other: int) -> None:
        total = self.table(other, variable) + self.costs[variable][None, :]
        best = np.argmin(total, axis=1)
        self.costs[other] = self.costs[other] + np.take_along_axis(total, best[:, None], axis=1)[:, 0]
        options = self.options[other]
        self._record(variable, lambda full: int(best[_position(options, full[other])]))

    def _eliminate_between(self, variable: int, first: int, second: int) -> None:
        left = self.table(first, variable) + self.costs[variable][None, :]
        right = self.table(variable, second)
        best = np.zeros((left.shape[0], right.shape[1]), dtype=np.int32)
        table = np.empty(best.shape)
        for row in range(left.shape[0]):
            total = left[row][:, None] + right
            best[row] = np.argmin(total, axis=0)
            table[row] = np.min(total, axis=0)
        self.add_table(first, second, table)
        rows, columns = self.options[first], self.options[second]
        self._record(
            variable,
            lambda full: int(best[_position(rows, full[first]), _position(columns, full[second])]),
        )

    def _record(self, variable: int, position: _Decide) -> None:
        """Record how `Reduced.expand` decides an eliminated variable.

        `position` takes original options of the decided variables. It returns the position of the best option among
        the variable's remaining options.
        """
        options = self.options[variable]
        self.eliminated.append((variable, lambda full: int(options[position(full)])))

    def result(self, limit: float) -> Reduced:
        kept = tuple(item for item in range(len(self.costs)) if item not in self.gone)
        index = {variable: position for position, variable in enumerate(kept)}
        keys = [key for key in sorted(self.tables) if key[0] in index and key[1] in index]
        edges = tuple(Edge(index[a], index[b], self.tables[a, b]) for a, b in keys)
        position = {key: number for number, key in enumerate(keys)}
        rows = tuple(
            MemoryRow(
                constant,
                {index[variable]: array for variable, array in variables.items()},
                {position[key]: array for key, array in tables.items()},
            )
            for constant, variables, tables in zip(self.row_constants, self.row_variables, self.row_tables, strict=True)
        )
        problem = Assignment(tuple(self.costs[item] for item in kept), edges, rows, limit)
        return Reduced(problem, self.constant, kept, tuple(self.options), tuple(self.eliminated))


def _ordered(first: int, second: int, table: Floats) -> tuple[tuple[int, int], Floats]:
    return ((first, second), table) if first < second else ((second, first), table.T)


def _row_tables(row: MemoryRow, edges: Sequence[Edge]) -> dict[tuple[int, int], Floats]:
    tables: dict[tuple[int, int], Floats] = {}
    for number, array in row.edges.items():
        key, table = _ordered(edges[number].tail, edges[number].head, array)
        tables[key] = tables[key] + table if key in tables else table
    return tables


def _take(table: Floats, key: tuple[int, int], variable: int, keep: np.ndarray) -> Floats:
    return table[keep] if key[0] == variable else table[:, keep]


def _undominated(profile: Floats) -> np.ndarray:
    """Return the sorted indices of the rows of `profile` that no other row dominates.

    A row is an option, and its columns are costs and bytes. A row is dominated if another row is nowhere larger. The
    first of several equal rows stays.
    """
    kept: list[int] = []
    order = np.lexsort((np.arange(len(profile)), np.where(np.isfinite(profile), profile, 1e30).sum(axis=1)))
    for row in order:
        if not (kept and np.all(profile[kept] <= profile[row], axis=1).any()):
            kept.append(int(row))
    return np.sort(kept)


def _position(options: np.ndarray, option: int) -> int:
    return int(np.searchsorted(options, option))
