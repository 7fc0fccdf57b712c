r"""Make one choice of many: the cheapest that takes from each what it has best.

Under multipliers for memory every choice that messages round to is good at something, and few fit (`dual_search`). What
they agree on is mostly right; where they differ, a mixed-integer program decides:

1. Of each variable keep the options that any choice seen has, and forbid the others.
2. Solve the rest with memory rows as they are needed (`row_search`), for what is cheaper than a target not far above
   the bound; where nothing is found, than ones farther above, and at last than the incumbent.

That a tour which is best among the edges of some good ones is better than each is known of the travelling salesman
(Cook and Seymour, "Tour Merging via Branch-Decomposition", 2003), and of mixed-integer programs, where most of what
solutions and relaxations agree on is fixed (Danna, Rothberg and Le Pape, "Exploring relaxation induced neighborhoods to
improve MIP solutions", 2005). What is proven of the rest bounds nothing but that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from passes.solver.assignment import Floats, MemoryRow
from passes.solver.dual_state import DualState
from passes.solver.row_search import RowSearch
from passes.solver.solve_milp import Effort

_NODES = 50
"""Nodes of the solver's tree in which the rest is solved."""


def merge(state: DualState, tolerance: float, deadline: float) -> None:
    """Improve the incumbent of a state, or find one, from the choices that it has seen.

    Args:
        state: after rounds of message passing.
        tolerance: relative gap at which the search is content.
        deadline: of `time.monotonic`.
    """
    if not state.cuts or state.is_over(deadline):
        return
    _solve(state, _seen(state), tolerance, deadline)


def _seen(state: DualState) -> list[np.ndarray]:
    """Which options of each variable any choice seen has."""
    masks = [np.zeros(len(cost), dtype=bool) for cost in state.problem.costs]
    for choice in (choice for _, _, choice in state.cuts):
        for mask, option in zip(masks, choice, strict=True):
            mask[option] = True
    return masks


def _solve(state: DualState, masks: Sequence[np.ndarray], tolerance: float, deadline: float) -> None:
    """Offer the cheapest choice that has only options which masks leave, if it is cheaper than the incumbent."""
    costs = tuple(np.where(mask, cost, np.inf) for mask, cost in zip(masks, state.problem.costs, strict=True))
    rows = tuple(row.among(masks) for row in state.rows.values())
    left = dataclasses.replace(state.problem, costs=costs, rows=rows)
    for above in (*_ABOVE, np.inf):
        known = min(state.best_cost, state.bound * (1 + above * tolerance)) if above < np.inf else state.best_cost
        effort = Effort(0.5 * tolerance, _NODES)
        rounds = RowSearch(partial(_Used, state, masks), left, deadline, state.control, known, effort)
        with state.control.unseen():
            found, _ = rounds.cheapest()
        if found is not None:
            state.offer(found.choice)
        if found is not None or known == state.best_cost or state.is_over(deadline):
            return
        left = dataclasses.replace(left, rows=rounds.problem.rows)


_ABOVE = (4, 16, 64)
"""How many times the tolerance targets are above the bound: of what may cost as much as a bad incumbent little can be
left out."""


@dataclass(frozen=True, slots=True)
class _Used:
    """The memory under one choice of a state's problem."""

    state: DualState
    masks: Sequence[np.ndarray]
    choice: Sequence[int]

    def used(self) -> Floats:
        """See `Counted`."""
        return self.state.usage(self.choice)

    def row(self, point: int) -> MemoryRow:
        """See `Counted`."""
        return self.state.row(point).among(self.masks)
