"""Combine the choices that a search has seen into one cheaper choice.

Each option of the combined choice occurs in some seen choice. A choice that is rounded from messages is good in some
variables, but few rounded choices fit (`dual_search`). Options that all choices share are mostly right. A
mixed-integer program decides the other variables:

1. Allow the options of each variable that occur in any seen choice, and forbid its other options.
2. Solve this reduced problem for choices that are cheaper than the best so far. Memory binds at few program points,
   and these are not known in advance. If the solution exceeds the limit at some points, add their rows, and solve once
   more. Each solved problem is a relaxation of the reduced problem. So the first solution that fits is its optimum, as
   far as the solver's tree was searched.

Tours of the travelling salesman are combined in this way (Cook and Seymour, "Tour Merging via Branch-Decomposition",
2003). A neighbourhood search of mixed-integer programs fixes the variables on which solutions agree (Danna, Rothberg
and Le Pape, "Exploring relaxation induced neighborhoods", 2005). The bound of the reduced problem does not bound the
whole problem.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import numpy as np

from passes.solver.assignment import row_against
from passes.solver.dual_state import DualState
from passes.solver.solve_milp import Effort, solve_milp

_COLUMNS = 1e5
"""The most work of one solve: columns of the mixed-integer program, times nodes of the branch-and-bound tree.

A Llama 13B with repeated blocks left out gets some 80 nodes, in 0.3 s; a GPT-2 of two layers gets 20. With 100 nodes,
the GPT-2 took up to 20 s, for steps at most 0.9 % cheaper (2026-11-28).
"""

_SOLVED = 40
"""The most mixed-integer programs that one merge solves, each with more memory rows than the program before."""

_ROUNDING = 1e-9
"""Relative error of the solver's costs. Costs that differ by less count as equal."""


def merge(state: DualState, tolerance: float) -> None:
    """Combine the seen choices of a search into a cheaper choice that fits, and record it (`state.offer`).

    Args:
        state: a search after rounds of message passing; its best choice may be None.
        tolerance: relative gap at which the search ends. The combination is solved to half this gap.
    """
    if not state.cuts:
        return
    masks, refused = _seen(state), set[tuple[int, ...]]()
    costs = tuple(np.where(mask, cost, np.inf) for mask, cost in zip(masks, state.problem.costs, strict=True))
    rows = list(state.rows.values())
    below, effort = state.best_cost * (1 - _ROUNDING), Effort(0.5 * tolerance, _COLUMNS)
    with state.control.unseen(), suppress(TimeoutError):
        for _ in range(_SOLVED):
            if state.control.is_over():
                return
            left = dataclasses.replace(state.problem, costs=costs, rows=tuple(rows))
            found = solve_milp(left, control=state.control, below=below, effort=effort)
            if found is None:
                return
            over = _highest_over(state.usage(found.choice), state.problem.limit)
            if not over:
                state.offer(found.choice)
                return
            if found.choice in refused:
                rows.append(row_against(found.choice, costs, state.problem.limit))
            else:
                rows += [state.row(point) for point in over]
            refused.add(found.choice)


def _seen(state: DualState) -> list[np.ndarray]:
    """Return for each variable a boolean array [options]: True for each option that occurs in a seen choice."""
    masks = [np.zeros(len(cost), dtype=bool) for cost in state.problem.costs]
    for choice in (choice for _, _, choice in state.cuts):
        for mask, option in zip(masks, choice, strict=True):
            mask[option] = True
    return masks


_MOST_PEAKS = 4
"""After one solve, memory rows of at most this many program points are added."""


def _highest_over(used: np.ndarray, limit: float) -> list[int]:
    """Return, for each run of consecutive program points that exceed `limit`, its point with the most bytes.

    `used` has the bytes at each point, [points]. The points are sorted by their bytes, most first. Only the first
    `_MOST_PEAKS` are returned.
    """
    over = np.flatnonzero(used > limit)
    if not len(over):
        return []
    runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    peaks = (int(run[np.argmax(used[run])]) for run in runs)
    return sorted(peaks, key=lambda point: -used[point])[:_MOST_PEAKS]
