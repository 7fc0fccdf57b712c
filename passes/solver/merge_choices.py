r"""Combine the choices that a search has seen into the cheapest choice that fits in memory.

A choice that is rounded from messages is good in some variables and bad in others. So each variable may take an option
that occurs in any seen choice; in a small problem, any option. HiGHS solves this restricted problem as a mixed-integer
linear program. The column \(x_{vo}\) is 1 if variable \(v\) takes option \(o\), else 0. The column \(y_{ep}\), from
0 to 1, stands for a pair of options of an edge:

.. math:: \min \sum_{v,o} c_v[o] x_{vo} + \sum_{e,p} C_e[p] y_{ep} \quad\text{s.t.}\quad
          \sum_o x_{vo} = 1, \quad \sum_{p \ni o} y_{ep} = x_{vo} \text{ at both ends of each edge } e.

Memory binds at few program points, and these are not known in advance. If the solution exceeds the limit at other
points, their rows are added, and the program is solved again.

Tours of the travelling salesman are combined in this way (Cook and Seymour, "Tour Merging via Branch-Decomposition",
2003).
"""

from __future__ import annotations

from collections.abc import Sequence

import highspy
import numpy as np

from passes.solver.assignment import Floats, MemoryRow
from passes.solver.dual_state import DualState
from passes.solver.quiet_highs import QuietHighs

_SMALL = 10_000
"""The most pairs of options, over all edges, of a small problem.

Chains of this size, of 400 variables with 5 options to 12 with 30, took 0.2 to 0.9 CPU s (2026-12-01).
"""

_WORK = 1e5
"""The most work of one solve: columns of the program, times nodes of the branch-and-bound tree.

A Llama 13B gets some 80 nodes, in 0.3 s. With 100 nodes, a GPT-2 of two layers took up to 20 s, for steps at most
0.9 % cheaper (2026-11-28).
"""

_SOLVED = 40
"""The most programs that one merge solves, each with more memory rows than the program before."""

_SETTINGS = {
    "threads": 1,
    "random_seed": 0,
    "mip_abs_gap": 0.0,
    "primal_feasibility_tolerance": 1e-9,
    "mip_feasibility_tolerance": 1e-9,
    "mip_allow_restart": False,
    "mip_detect_symmetry": False,
    "mip_heuristic_effort": 0.0,
}
"""Nine problems with memory rows took 20.9 s with HiGHS's restarts and heuristics, and 5.1 s without (HiGHS 1.15)."""


def merge(state: DualState, tolerance: float) -> None:
    """Offer the cheapest combination of the seen choices to the search, if one is cheaper than the best and fits.

    Args:
        state: a search after rounds of message passing; its best choice may be None.
        tolerance: relative gap at which the search ends. The combination is solved to half this gap.
    """
    allowed = _allowed(state)
    if state.control.is_over() or not allowed or not all(map(len, allowed)):
        return
    solved = set[tuple[int, ...]]()
    program = _MergeProgram(state, allowed, 0.5 * tolerance)
    for row in state.rows.values():
        program.limit(row)
    for _ in range(_SOLVED):
        choice = None if state.control.is_over() else program.solve()
        if choice is None or choice in solved:  # again: it exceeds a row by less than the solver's tolerance
            return
        solved.add(choice)
        over = _highest_over(state.usage(choice), state.problem.limit)
        if not over:
            state.offer(choice)
            return
        for point in over:
            program.limit(state.row(point))


def _allowed(state: DualState) -> list[np.ndarray]:
    """Return the options that each variable of a merged choice may take, or [] if no choice was seen."""
    if sum(edge.cost.size for edge in state.problem.edges) <= _SMALL:
        return [np.flatnonzero(np.isfinite(costs)) for costs in state.problem.costs]
    return [np.unique(options) for options in np.array([choice for _, _, choice in state.cuts]).T]


def _highest_over(used: np.ndarray, limit: float) -> list[int]:
    """Return the point of most bytes in each run of program points over `limit`: at most four, most bytes first.

    `used` has the bytes at each point, [points].
    """
    over = np.flatnonzero(used > limit)
    runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1) if len(over) else []
    return sorted((int(run[np.argmax(used[run])]) for run in runs), key=lambda point: -used[point])[:4]


class _MergeProgram:
    """The mixed-integer program of the module's docstring."""

    def __init__(self, state: DualState, allowed: Sequence[np.ndarray], gap: float) -> None:
        problem = self._problem = state.problem
        self._allowed = allowed
        costs = [each[options] for each, options in zip(problem.costs, allowed, strict=True)]
        pairs = [edge.cost[np.ix_(allowed[edge.tail], allowed[edge.head])] for edge in problem.edges]
        every = np.concatenate([part.reshape(-1) for part in (*costs, *pairs)])
        numbers = np.split(np.arange(every.size, dtype=np.int32), np.cumsum([part.size for part in (*costs, *pairs)]))
        self._options = numbers[: len(costs)]
        """The columns of each variable's options, [options]."""
        self._pairs = [each.reshape(pair.shape) for each, pair in zip(numbers[len(costs) : -1], pairs, strict=True)]
        """The columns of each edge's pairs, [options of tail, options of head]."""
        self._highs = QuietHighs()
        scale = 1e3 / (min((cost for cost, _, _ in state.cuts), default=0.0) or 1.0)
        self._add_columns(every, sum(map(len, costs)), scale)
        for options in self._options:
            self._add_row(options, np.ones(len(options)), 1.0, 1.0)
        for edge, columns in zip(problem.edges, self._pairs, strict=True):
            self._add_ends(self._options[edge.tail], columns)
            self._add_ends(self._options[edge.head], columns.T)
        settings = {**_SETTINGS, "mip_rel_gap": gap, "mip_max_nodes": int(max(1.0, _WORK / every.size))}
        if state.best is not None:
            settings["objective_bound"] = (1 - 1e-9) * state.best_cost * scale
        for name, value in settings.items():
            self._highs.setOptionValue(name, value)

    def _add_columns(self, costs: Floats, options: int, scale: float) -> None:
        """Add a column for each cost. Columns of infinite cost are zero; the first `options` columns are integers."""
        finite = np.isfinite(costs)
        self._highs.addVars(costs.size, np.zeros(costs.size), finite.astype(float))
        every = np.arange(costs.size, dtype=np.int32)
        self._highs.changeColsCost(costs.size, every, np.where(finite, costs, 0.0) * scale)
        kinds = np.full(options, int(highspy.HighsVarType.kInteger), dtype=np.uint8)
        self._highs.changeColsIntegrality(options, every[:options], kinds)

    def _add_ends(self, options: np.ndarray, pairs: np.ndarray) -> None:
        """Add a row for each option of an edge's end: the sum of its pairs, [options, other options], is its column."""
        for option, columns in zip(options, pairs, strict=True):
            self._add_row(np.append(columns, option), np.append(np.ones(len(columns)), -1.0), 0.0, 0.0)

    def _add_row(self, columns: np.ndarray, values: Floats, lower: float, upper: float) -> None:
        self._highs.addRow(lower, upper, len(columns), columns, values)

    def limit(self, row: MemoryRow) -> None:
        """Add a memory row, in units of the memory limit."""
        problem, unit = self._problem, max(1.0, self._problem.limit)
        columns = [self._options[variable] for variable in row.variables]
        values = [sizes[self._allowed[variable]] for variable, sizes in row.variables.items()]
        for number, sizes in row.edges.items():
            edge = problem.edges[number]
            columns.append(self._pairs[number].reshape(-1))
            values.append(sizes[np.ix_(self._allowed[edge.tail], self._allowed[edge.head])].reshape(-1))
        if columns:
            self._add_row(
                np.concatenate(columns), np.concatenate(values) / unit, -np.inf, (problem.limit - row.constant) / unit
            )

    def solve(self) -> tuple[int, ...] | None:
        """Return the cheapest choice that fits the memory rows, or None if the solver finds none."""
        self._highs.run()
        if self._highs.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        values = np.array(self._highs.getSolution().col_value)
        options = zip(self._allowed, self._options, strict=True)
        return tuple(int(allowed[np.argmax(values[columns])]) for allowed, columns in options)
