r"""Forbid options, and pairs of options, that no choice below a known cost has.

A known choice that fits is what this lives on: where a bound is near its cost, most options are left out, and the rest
is solved far faster. For any :math:`\lambda`, and any :math:`\mu \ge 0`, a choice that fits costs no less than

.. math::
    \sum_v \theta_v[x_v] + \sum_{uv} \theta_{uv}[x_u, x_v] - \sum_t \mu_t (L - m_t), \quad
    \theta_v = c_v + \sum_{e \ni v} \lambda_{ev} + \sum_t \mu_t M_{tv}, \quad
    \theta_{uv} = C_{uv} - \lambda_{(uv)u} - \lambda_{(uv)v} + \sum_t \mu_t M_{tuv}.

With the least of each table that is a bound for all choices. Those that have an option cost more by what it is above
the least of its variable, and by what the least of its pairs is above the least of each edge (`_Slacks`). Where this
reaches the known cost, the option goes (reduced cost fixing; Dantzig, Fulkerson and Johnson, 1954). The multipliers are
those of the linear relaxation (`best_multipliers`); whatever they are, what they prove is computed here.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from passes.solver.assignment import Assignment, Edge, Floats
from passes.solver.reduce_assignment import Reduced, reduce_assignment
from passes.solver.solve_milp import Multipliers, best_multipliers

_ROUNDS = 4
"""Times that the rest is narrowed again, which has a better relaxation."""

_WORTHWHILE = 0.9
"""Part of the options of before that may be left for another round to follow."""

_MARGIN = 1e-9
"""Part of the known cost by which sums of seconds may be wrong."""


def narrow(problem: Assignment, below: float, deadline: float) -> Assignment | None:
    """The assignment without what no choice that fits and costs less than `below` has: such options cost infinity.

    None if there is no such choice.

    Args:
        problem: the assignment.
        below: seconds, what a choice costs that is known.
        deadline: of `time.monotonic`.

    Raises:
        TimeoutError: the deadline passed before anything was known.
    """
    for _ in range(_ROUNDS):
        reduced = reduce_assignment(problem)
        if not reduced.problem.costs:
            return problem if reduced.constant < below else None
        multipliers = best_multipliers(reduced.problem, deadline - time.monotonic())
        if multipliers is None:
            return None
        slacks = _slacks(reduced.problem, multipliers)
        spare = below * (1 + _MARGIN) - reduced.constant - slacks.bound
        if spare < 0:
            return None
        before = _options(problem)
        problem = _without(problem, reduced, slacks, spare)
        if _options(problem) > _WORTHWHILE * before:
            return problem
    return problem


def _options(problem: Assignment) -> int:
    return sum(int(np.isfinite(cost).sum()) for cost in problem.costs)


@dataclass(frozen=True, slots=True)
class _Slacks:
    """What choices cost at least, seconds, and how much more with each option, and with each pair of options."""

    bound: float
    options: Sequence[Floats]
    pairs: Sequence[Floats]


def _slacks(problem: Assignment, multipliers: Multipliers) -> _Slacks:
    costs, tables = list(problem.costs), [edge.cost for edge in problem.edges]
    bound = 0.0
    for number, (edge, (tail, head)) in enumerate(zip(problem.edges, multipliers.edges, strict=True)):
        tables[number] = tables[number] - tail[:, None] - head[None, :]
        costs[edge.tail] = costs[edge.tail] + tail
        costs[edge.head] = costs[edge.head] + head
    for row, price in zip(problem.rows, multipliers.rows, strict=True):
        bound -= price * (problem.limit - row.constant)
        for variable, sizes in row.variables.items():
            costs[variable] = costs[variable] + price * sizes
        for number, sizes in row.edges.items():
            tables[number] = tables[number] + price * sizes
    bound += float(sum(table.min() for table in (*costs, *tables)))
    if not np.isfinite(bound):
        return _Slacks(np.inf, (), ())
    pairs = [table - table.min() for table in tables]
    options = [cost - cost.min() for cost in costs]
    for edge, slack in zip(problem.edges, pairs, strict=True):
        options[edge.tail] = options[edge.tail] + slack.min(axis=1)
        options[edge.head] = options[edge.head] + slack.min(axis=0)
    return _Slacks(bound, options, [_of_pairs(*item, options) for item in zip(problem.edges, pairs, strict=True)])


def _of_pairs(edge: Edge, slack: Floats, options: Sequence[Floats]) -> Floats:
    """What choices with each pair of options cost more; the pair's own part is in that of both ends, as its least."""
    tail, head = slack.min(axis=1), slack.min(axis=0)
    with np.errstate(invalid="ignore"):
        of_tail, of_head = options[edge.tail] - tail, options[edge.head] - head
        total = slack + of_tail[:, None] + of_head[None, :]
    return np.where(np.isnan(total), np.inf, total)


def _without(problem: Assignment, reduced: Reduced, slacks: _Slacks, spare: float) -> Assignment:
    """The whole problem without what costs more than there is to spare in the reduced one.

    An option that is no better than another one goes with it.
    """
    costs, edges, left = list(problem.costs), list(problem.edges), reduced.left
    for (variable, places), slack in zip(left, slacks.options, strict=True):
        costs[variable] = np.where(_is_over(slack > spare, places), np.inf, costs[variable])
    between = {(edge.tail, edge.head): number for number, edge in enumerate(edges)}
    for edge, slack in zip(reduced.problem.edges, slacks.pairs, strict=True):
        (tail, tails), (head, heads) = left[edge.tail], left[edge.head]
        over = _is_over(slack > spare, tails, heads)
        if (tail, head) in between:
            edges[between[tail, head]] = _forbidding(edges[between[tail, head]], over)
        elif (head, tail) in between:
            edges[between[head, tail]] = _forbidding(edges[between[head, tail]], over.T)
    return dataclasses.replace(problem, costs=tuple(costs), edges=tuple(edges))


def _is_over(flags: np.ndarray, *places: np.ndarray) -> np.ndarray:
    """Flags of all options, or pairs, by those of the ones that stand for them; what is forbidden has none."""
    found = flags[np.ix_(*places)]
    for axis, of_axis in enumerate(places):
        found = np.moveaxis(found, axis, 0)
        found[of_axis < 0] = True
        found = np.moveaxis(found, 0, axis)
    return found


def _forbidding(edge: Edge, pairs: np.ndarray) -> Edge:
    return dataclasses.replace(edge, cost=np.where(pairs, np.inf, edge.cost))
