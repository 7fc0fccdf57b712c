r"""Solve an assignment exactly, as a mixed-integer program, with HiGHS.

The program (`_Model`) has two kinds of variables. :math:`x_{vo} \in \{0, 1\}` is one if option `o` of variable `v` is
chosen. :math:`f_{uv,rc} \ge 0` is one if the chosen options of edge `(u, v)` are in groups `r` and `c`. Options with
equal costs and bytes against all options of the edge's other variable form one group. So an edge has far fewer `f` than
pairs of options.

.. math::
    \min \sum_{v,o} c_{vo} x_{vo} + \sum_{uv,rc} C_{uv,rc} f_{uv,rc}

subject to
    * :math:`\sum_o x_{vo} = 1` for each variable (`_add_choices`),
    * :math:`\sum_c f_{uv,rc} = \sum_{o \in r} x_{uo}` and :math:`\sum_r f_{uv,rc} = \sum_{o \in c} x_{vo}` for each
      edge (`_add_edge`): the local polytope, exact on trees,
    * memory: :math:`m_t + \sum M_{tvo} x_{vo} + \sum M_{tuv,rc} f_{uv,rc} \le L` for each row (`_add_row`).

The objective is scaled so that the solver's absolute tolerances do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import highspy
import numpy as np

from passes.solver.assignment import Assignment, Edge, Floats, MemoryRow, Solution
from passes.solver.quiet_highs import QuietHighs
from passes.solver.reduce_assignment import reduce_assignment
from passes.solver.search_control import SearchControl

_NO_SOLUTION = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits of the branch-and-bound search.

    Args:
        relative_gap: the search ends when choice and bound differ by at most this fraction.
        most_columns: the limit of (columns of the program × nodes of the tree). So a larger program gets fewer nodes.
    """

    relative_gap: float
    most_columns: float

    def most_nodes(self, columns: int) -> int:
        """Return the most nodes of the search tree for a mixed-integer program with `columns` columns, at least one."""
        return int(min(highspy.kHighsIInf, max(1.0, self.most_columns / columns)))


UNLIMITED = Effort(1e-9, math.inf)


def solve_milp(
    problem: Assignment,
    *,
    control: SearchControl | None = None,
    below: float = math.inf,
    effort: Effort = UNLIMITED,
) -> Solution | None:
    """Return the cheapest choice that fits, with a lower bound; None if no choice that costs less than `below` fits.

    Args:
        control: receives the lower bound while the solver runs. If the control stops the solver, the best choice so
            far is returned, with the bound proven by then.
        below: seconds; a choice that costs this much or more is not returned.
        effort: the relative gap and the amount of work at which the solver ends.

    Raises:
        TimeoutError: the search was stopped, or its effort was used up, before a choice was found.
    """
    if control is not None and control.is_over():
        raise TimeoutError("the search was over before anything was solved")
    reduced = reduce_assignment(problem)
    if not reduced.problem.costs:
        choice, bound = (), 0.0
        fits = all(row.constant <= problem.limit for row in reduced.problem.rows)
        found = ((), 0.0) if fits and reduced.constant < below else None
    else:
        left = below - reduced.constant
        found = _solve(reduced.problem, _watching(control, reduced.constant), left, effort)
    if found is None:
        return None
    choice, bound = found
    full = reduced.expand(choice)
    cost = problem.cost_of(full)
    if not np.isfinite(cost):
        return None
    return Solution(full, cost, min(cost, reduced.constant + bound))


_GoesOn = Callable[[float], bool]
"""Function that takes the proven lower bound, in seconds, and returns whether the solver goes on."""


def _watching(control: SearchControl | None, constant: float) -> _GoesOn | None:
    """Return a function that takes the solver's lower bound, and gives it plus `constant` seconds to `control`.

    The function returns whether the solver goes on. It does not report the solver's choice, because this may exceed
    memory rows that are not known yet. Without control, the result is None.
    """
    if control is None:
        return None

    def goes_on(bound: float) -> bool:
        control.note(math.inf, constant + bound)
        return not control.is_over()

    return goes_on


def _solve(
    problem: Assignment, goes_on: _GoesOn | None, below: float, effort: Effort
) -> tuple[tuple[int, ...], float] | None:
    model = _Model(problem)
    if not model.run(goes_on, below, effort):
        return None
    return model.choice(), model.bound()


@dataclass(slots=True)
class _Columns:
    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)

    def add(self, costs: Floats, *, integer: bool) -> int:
        """Add a column for each cost, and return the index of the first. A column of infinite cost is fixed to zero."""
        first = len(self.cost)
        finite = np.isfinite(costs)
        self.cost += np.where(finite, costs, 0.0).tolist()
        self.upper += np.where(finite, 1.0, 0.0).tolist()
        self.integer += [integer] * len(costs)
        return first


@dataclass(slots=True)
class _Rows:
    """The program's constraints as a sparse matrix by rows.

    `start` has the position of each row's first entry in `index` and `value`, then the number of all entries.
    """

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    start: list[int] = field(default_factory=lambda: [0])
    index: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def add(self, index: list[int], value: list[float], lower: float, upper: float) -> None:
        self.index += index
        self.value += value
        self.start.append(len(self.index))
        self.lower.append(lower)
        self.upper.append(upper)


class _Model:
    def __init__(self, problem: Assignment) -> None:
        self._problem = problem
        self._columns, self._rows = _Columns(), _Rows()
        self._scale = _cost_scale(problem)
        self._limit = problem.limit
        self._first = [self._columns.add(_keep_infinite(cost, self._scale), integer=True) for cost in problem.costs]
        self._add_choices()
        flows = [self._add_edge(number, edge) for number, edge in enumerate(problem.edges)]
        for row in problem.rows:
            self._add_row(row, flows)
        self._highs = QuietHighs()
        self._raised: BaseException | None = None

    def _add_choices(self) -> None:
        for first, cost in zip(self._first, self._problem.costs, strict=True):
            self._rows.add(list(range(first, first + len(cost))), [1.0] * len(cost), 1.0, 1.0)

    def _add_edge(self, number: int, edge: Edge) -> _Flow:
        weights = [row.edges[number] for row in self._problem.rows if number in row.edges]
        tail_group, head_group = (
            _groups([edge.cost, *weights]),
            _groups([edge.cost.T, *(w.T for w in weights)]),
        )
        tail_of, head_of = _first_of(tail_group), _first_of(head_group)
        cost = edge.cost[np.ix_(tail_of, head_of)]
        first = self._columns.add(_keep_infinite(cost.reshape(-1), self._scale), integer=False)
        flow = _Flow(first + np.arange(cost.size).reshape(cost.shape), tail_of, head_of)
        self._add_group_rows(flow.columns, self._first[edge.tail], tail_group)
        self._add_group_rows(flow.columns.T, self._first[edge.head], head_group)
        return flow

    def _add_group_rows(self, flows: np.ndarray, first: int, groups: np.ndarray) -> None:
        """Add a constraint for each group of a variable's options: its pairs have the same sum as its options.

        Args:
            flows: columns of the pairs, [groups, groups of the other variable].
            first: the column of the variable's first option.
            groups: the group of each option, [options].
        """
        members: list[list[int]] = [[] for _ in flows]
        for option, group in enumerate(groups.tolist(), first):
            members[group].append(option)
        for columns, options in zip(flows.tolist(), members, strict=True):
            self._rows.add(columns + options, [1.0] * len(columns) + [-1.0] * len(options), 0.0, 0.0)

    def _add_row(self, row: MemoryRow, flows: list[_Flow]) -> None:
        unit = max(1.0, self._limit)
        index = [
            np.zeros(0, dtype=int),
            *(self._first[v] + np.arange(len(a)) for v, a in row.variables.items()),
        ]
        value = [np.zeros(0), *(array / unit for array in row.variables.values())]
        for number, array in row.edges.items():
            index.append(flows[number].columns.reshape(-1))
            value.append(array[np.ix_(flows[number].tail_of, flows[number].head_of)].reshape(-1) / unit)
        limit = (self._limit - row.constant) / unit
        self._rows.add(np.concatenate(index).tolist(), np.concatenate(value).tolist(), -np.inf, limit)

    def run(
        self,
        goes_on: _GoesOn | None = None,
        below: float = math.inf,
        effort: Effort = UNLIMITED,
    ) -> bool:
        """Run the solver; return whether it found a choice that costs less than `below` seconds.

        Raises:
            TimeoutError: the solver ended early, and such a choice may exist.
        """
        highs = self._highs
        for option, value in _options(effort, len(self._columns.cost)).items():
            highs.setOptionValue(option, value)
        if math.isfinite(below):
            highs.setOptionValue("objective_bound", below * self._scale)
        if goes_on is not None:
            highs.cbMipInterrupt.subscribe(lambda event: self._check_bound(event, goes_on))
        highs.passModel(self._program())
        highs.run()
        if self._raised is not None:
            raise self._raised
        status = highs.getModelStatus()
        if status in _NO_SOLUTION:
            return False
        if highs.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            raise TimeoutError("the solver ended before it found a choice")
        if highs.getInfo().objective_function_value >= below * self._scale:
            if status != highspy.HighsModelStatus.kOptimal:
                raise TimeoutError("the solver ended before it found a better choice")
            return False
        return True

    def _check_bound(self, event: highspy.HighsCallbackEvent, goes_on: _GoesOn) -> None:
        """Pass the solver's lower bound to `goes_on`, and interrupt the solver if the answer is False.

        HiGHS calls this in the main thread, so Python notices Ctrl-C. An exception must not pass through the solver's
        code, so `run` raises it after the solver has ended.
        """
        try:
            is_over = not goes_on(event.data_out.mip_dual_bound / self._scale)
        except BaseException as error:  # noqa: BLE001  (raised again, by run)
            self._raised, is_over = error, True
        if is_over:
            event.interrupt()

    def _program(self) -> highspy.HighsLp:
        columns, rows = self._columns, self._rows
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(columns.cost), len(rows.lower)
        program.col_cost_ = np.array(columns.cost)
        program.col_lower_ = np.zeros(len(columns.cost))
        program.col_upper_ = np.array(columns.upper)
        program.row_lower_, program.row_upper_ = np.array(rows.lower), np.array(rows.upper)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.array(rows.start)
        program.a_matrix_.index_ = np.array(rows.index)
        program.a_matrix_.value_ = np.array(rows.value)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        program.integrality_ = [kinds[flag] for flag in columns.integer]
        return program

    def choice(self) -> tuple[int, ...]:
        solution = np.array(self._highs.getSolution().col_value)
        sizes = [len(cost) for cost in self._problem.costs]
        return tuple(int(np.argmax(solution[f : f + n])) for f, n in zip(self._first, sizes, strict=True))

    def bound(self) -> float:
        """Return the proven lower bound of the mixed-integer program's optimum, in seconds."""
        return float(self._highs.getInfo().mip_dual_bound) / self._scale


@dataclass(frozen=True, slots=True)
class _Flow:
    """The columns of the mixed-integer program for the pairs of one edge's groups of options.

    Args:
        columns: [groups of tail, groups of head].
        tail_of, head_of: the first option of each group of the tail, and of the head.
    """

    columns: np.ndarray
    tail_of: np.ndarray
    head_of: np.ndarray


_WITHOUT_DETOURS = {
    "mip_allow_restart": False,
    "mip_detect_symmetry": False,
    "mip_heuristic_effort": 0.0,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
}
"""Options that turn off the parts of HiGHS that cost more time than they save (HiGHS 1.15).

Nine problems with memory rows took 20.9 s with restarts and heuristics, and 5.1 s without them. Ten problems without
memory rows took 0.85 to 1.01 s with feasibility jump and symmetry detection, and 0.49 s without them.
"""


def _options(effort: Effort, columns: int) -> dict[str, bool | int | float]:
    return {
        "threads": 1,
        "random_seed": 0,
        "mip_rel_gap": effort.relative_gap,
        "mip_max_nodes": effort.most_nodes(columns),
        "mip_abs_gap": 0.0,
        "primal_feasibility_tolerance": 1e-9,
        "mip_feasibility_tolerance": 1e-9,
        **_WITHOUT_DETOURS,
    }


def _cost_scale(problem: Assignment) -> float:
    """Return a factor that brings costs to the size that the solver's absolute tolerances suit.

    The median positive costs of all variables and edges, multiplied by the factor, sum to 1000. The factor is 1 if no
    cost is positive.
    """
    tables = [*problem.costs, *(edge.cost for edge in problem.edges)]
    sizes = [float(np.median(table[np.isfinite(table) & (table > 0)])) for table in tables if _has_positive(table)]
    return 1e3 / sum(sizes) if sizes else 1.0


def _has_positive(table: Floats) -> bool:
    return bool(np.any(np.isfinite(table) & (table > 0)))


def _keep_infinite(costs: Floats, factor: float) -> Floats:
    return np.where(np.isfinite(costs), np.where(np.isfinite(costs), costs, 0.0) * factor, np.inf)


def _groups(tables: list[Floats]) -> np.ndarray:
    """Return the group of each row, [rows].

    Rows of one group are equal in all tables. Groups are numbered in the order of their first rows.
    """
    joined = np.concatenate(tables, axis=1)
    numbers: dict[bytes, int] = {}
    rows = (np.where(np.isfinite(joined), joined, -1.0) + 0.0).tobytes()  # a negative zero is zero
    size = len(rows) // len(joined)
    return np.array([numbers.setdefault(rows[at : at + size], len(numbers)) for at in range(0, len(rows), size)])


def _first_of(groups: np.ndarray) -> np.ndarray:
    return np.unique(groups, return_index=True)[1]
