r"""Make one choice of many: the cheapest that takes from each what it has best.

Under multipliers for memory every choice that messages round to is good at something, and few fit (`dual_search`). What
they agree on is mostly right; where they differ, a mixed-integer program decides:

1. Of each variable keep the options that any choice seen has, and forbid the others.
2. Solve the rest, for what is cheaper than the incumbent. Memory binds at few program points, and which ones is not
   known before: where what is found takes too much, add the rows of those points, and solve again. Each problem that is
   solved is a relaxation of the rest; so the first choice that fits is the best of it, as far as its tree was searched.

That a tour which is best among the edges of some good ones is better than each is known of the travelling salesman
(Cook and Seymour, "Tour Merging via Branch-Decomposition", 2003), and of mixed-integer programs, where most of what
solutions and relaxations agree on is fixed (Danna, Rothberg and Le Pape, "Exploring relaxation induced neighborhoods to
improve MIP solutions", 2005). What is proven of the rest bounds nothing but that.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import numpy as np

from passes.solver.assignment import row_against
from passes.solver.dual_state import DualState
from passes.solver.solve_milp import Effort, solve_milp

_COLUMNS = 1e5
"""Columns of all nodes of the solver's tree: some 80 nodes of a Llama of 13 billion whose alike blocks are left out,
which take 0.3 s, and 20 of a GPT-2 of two layers. Of that, 100 nodes took up to 20 s, and made steps 0.9 % cheaper or
none (limits of 0.2 to 0.7 of its memory, 2026-11-28)."""

_SOLVED = 40
"""Problems that are solved, each with more rows than the one before."""

_ROUNDING = 1e-9
"""Part of the costs by which a solver may be wrong: what differs by less is as cheap."""


def merge(state: DualState, tolerance: float) -> None:
    """Improve the incumbent of a state, or find one, from the choices that it has seen.

    Args:
        state: after rounds of message passing.
        tolerance: relative gap at which the search is content.
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
    """Which options of each variable any choice seen has."""
    masks = [np.zeros(len(cost), dtype=bool) for cost in state.problem.costs]
    for choice in (choice for _, _, choice in state.cuts):
        for mask, option in zip(masks, choice, strict=True):
            mask[option] = True
    return masks


_MOST_PEAKS = 4
"""Points whose rows are added at a time."""


def _highest_over(used: np.ndarray, limit: float) -> list[int]:
    """The points of the highest peaks over a limit: of each run of points over it, the highest."""
    over = np.flatnonzero(used > limit)
    if not len(over):
        return []
    runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    peaks = (int(run[np.argmax(used[run])]) for run in runs)
    return sorted(peaks, key=lambda point: -used[point])[:_MOST_PEAKS]
