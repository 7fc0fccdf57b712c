r"""Branch on what a large assignment's bound cannot decide: best-first search over restrictions of its options.

Where memory binds and many alike blocks choose as one, the Lagrangian bound (`dual_search`) mixes two choices of which
one does not fit, and stays below the optimum. So the options of one variable in which they differ are parted:

1. Take the open restriction of least bound. In it, compare the choice of least Lagrangian that fits with the
   one that does not: the variable that saves most bytes at the peak is parted, into the options that take more bytes
   there than the middle of both, and the others. Where only such that fit were seen, the options of one variable that
   differ most in bytes are.
2. Each part is bounded by some rounds of the dual search, which begin with the multipliers and the cuts of the whole.
   Parts whose bound is above the incumbent, within the tolerance, are closed.
3. The bound of all is the least of its parts' bounds and the incumbent. Stop when it meets the incumbent within the
   tolerance, when it hardly rises any more, when no part can be parted, after so many parts, or when time is up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from passes.solver.assignment import Floats, MemoryRow
from passes.solver.dual_state import DualState

_ROUNDS = 12
"""Rounds of the dual search on each part."""

_PATIENCE = 8
"""Parts by which the gap must close by a tenth of itself for the search to go on."""


def branch(state: DualState, tolerance: float, most_parts: int, deadline: float) -> None:
    """Raise the bound of a state, and improve its incumbent, until they meet within a tolerance.

    Args:
        state: with an incumbent; without one nothing is done.
        tolerance: relative gap at which the search is content.
        most_parts: restrictions that are parted at most.
        deadline: of `time.monotonic`, after which nothing more is parted.
    """
    if state.best is None:
        return
    number, gaps = 0, [state.gap()]
    open_parts, least_closed = [(state.bound, number, state)], np.inf
    for _ in range(most_parts):
        if not open_parts or state.gap() <= tolerance or state.is_over(deadline):
            return
        if len(gaps) > _PATIENCE and gaps[-1] > 0.9 * gaps[-1 - _PATIENCE]:
            return
        bound, _, part = heapq.heappop(open_parts)
        children = list(_parts(part))
        for child in children:
            child.best, child.best_cost = state.best, state.best_cost
            child.run(tolerance, _ROUNDS, deadline, state)
            if child.best_cost < state.best_cost:
                state.best, state.best_cost = child.best, child.best_cost
            if child.gap() > tolerance:
                number += 1
                heapq.heappush(open_parts, (child.bound, number, child))
            else:
                least_closed = min(least_closed, child.bound)
        if not children:
            least_closed = min(least_closed, bound)
        state.bound = min(open_parts[0][0] if open_parts else np.inf, least_closed, state.best_cost)
        gaps.append(state.gap())


def _parts(state: DualState) -> Iterator[DualState]:
    """The restrictions of a state to each part of the options of one variable; none where nothing can be parted."""
    fits, over = state.closest_choices()
    choice = over or fits
    if choice is None or not state.rows:
        return
    row = state.row(int(np.argmax(state.usage(choice)))) if over else state.heaviest_row()
    best, parted = 0.0, (0, np.zeros(0, dtype=bool))
    for variable, option in enumerate(choice):
        allowed = np.isfinite(state.problem.costs[variable])
        sizes = np.where(allowed, _sizes(state, row, variable, choice), np.inf)
        least = sizes[fits[variable]] if over and fits else sizes.min()
        most = sizes[option] if over else sizes[allowed].max()
        if most - least > best:
            best, parted = most - least, (variable, sizes > 0.5 * (most + least))
    variable, more = parted
    for mask in (more, ~more) if best > 0 else ():
        if np.isfinite(state.problem.costs[variable][mask]).any():
            yield state.restricted(variable, mask)


def _sizes(state: DualState, row: MemoryRow, variable: int, choice: Sequence[int]) -> Floats:
    """Bytes at a point by the option of one variable, with all others as chosen."""
    sizes = row.variables.get(variable, np.zeros(1)) + np.zeros(len(state.problem.costs[variable]))
    for number, table in row.edges.items():
        edge = state.problem.edges[number]
        if edge.tail == variable:
            sizes = sizes + table[:, choice[edge.head]]
        elif edge.head == variable:
            sizes = sizes + table[choice[edge.tail]]
    return sizes
