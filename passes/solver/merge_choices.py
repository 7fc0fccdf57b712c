r"""Combines many choices into one: the cheapest combination of their options that fits.

Under multipliers for memory, each rounded choice is good in some variables, and few choices fit (`dual_search`).
Options on which all choices agree are mostly optimal. A mixed-integer program decides the others:

1. Keep the options of each variable that any choice seen has, and forbid the others.
2. Search the rest for a choice that is cheaper than the incumbent. Memory binds at few program points, which are not
   known in advance. If the solution exceeds the limit at some points, add their rows, and solve again. Each solved
   problem is a relaxation of the rest. So the first choice that fits is optimal in it, as far as its tree was searched.

Travelling salesman solvers do the same: they merge good tours into a better one (Cook and Seymour, "Tour Merging via
Branch-Decomposition", 2003). Mixed-integer solvers fix variables on which solutions and relaxations agree (Danna,
Rothberg and Le Pape, "Exploring relaxation induced neighborhoods to improve MIP solutions", 2005). A bound of the rest
is no bound of the whole problem.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import numpy as np

from passes.solver.assignment import row_against
from passes.solver.dual_state import DualState
from passes.solver.solve_milp import Effort, solve_milp

_COLUMNS = 1e5
"""The most columns over all nodes of the solver's tree.

This allows some 80 nodes (0.3 s) for a Llama of 13 billion with left-out blocks, and 20 for a GPT-2 of two layers. For
GPT-2, 100 nodes took up to 20 s, and made steps at most 0.9 % cheaper. Limits were 0.2 to 0.7 of its memory
(2026-11-28).
"""

_SOLVED = 40
"""The most problems that are solved, each with more rows than the one before."""

_ROUNDING = 1e-9
"""The relative tolerance of a solver in costs: smaller differences count as equal."""


def merge(state: DualState, tolerance: float) -> None:
    """Improve the incumbent of a state, or find one, from the choices that it has seen.

    Args:
        state: the state after rounds of message passing.
        tolerance: relative gap at which the search ends.
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
    """Masks of the options of each variable that any choice seen has."""
    masks = [np.zeros(len(cost), dtype=bool) for cost in state.problem.costs]
    for choice in (choice for _, _, choice in state.cuts):
        for mask, option in zip(masks, choice, strict=True):
            mask[option] = True
    return masks


_MOST_PEAKS = 4
"""The most points whose rows are added at a time."""


def _highest_over(used: np.ndarray, limit: float) -> list[int]:
    """The points of the highest peaks over a limit: of each run of points over it, the highest."""
    over = np.flatnonzero(used > limit)
    if not len(over):
        return []
    runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    peaks = (int(run[np.argmax(used[run])]) for run in runs)
    return sorted(peaks, key=lambda point: -used[point])[:_MOST_PEAKS]
