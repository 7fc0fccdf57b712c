"""Find a choice of small peak memory in a large assignment, to decide whether any choice fits.

The peak is the maximum over program points. Minimising it is a game between the choice and a distribution over points.
In each round, the choice minimises the weighed memory by message passing. Points with many bytes gain weight
(multiplicative weights; Arora, Hazan and Kale, 2012). The choice of the smallest peak seen is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from passes.solver.assignment import Assignment, Edge, MemoryRow
from passes.solver.messages import Messages
from passes.solver.search_control import SearchControl

_ROUNDS = 24
_PASSES = 3
"""Message passes between two moves of the weights."""

_RATE = 4.0
_FORBIDDEN = 10.0
"""Price of a forbidden option, as a multiple of the peak of some choice. Costs here are bytes."""


def choice_of_smallest_peak(
    problem: Assignment,
    usage: Callable[[Sequence[int]], np.ndarray],
    row_at: Callable[[int], MemoryRow],
    enough: float = 0.0,
    hopeless: float = np.inf,
    *,
    control: SearchControl | None = None,
) -> tuple[int, ...]:
    """Return the choice of the smallest peak found.

    Args:
        problem, usage, row_at: see `DualSearch`.
        enough: a peak, in bytes, at which the search ends.
        hopeless: bytes. () is returned once every peak is proven to be above this.
        control: may stop the search.
    """
    choice = tuple(int(np.argmin(cost)) for cost in problem.costs)
    messages = Messages(_without_costs(problem, forbidden=_FORBIDDEN * max(1.0, float(usage(choice).max()))))
    rows: dict[int, MemoryRow] = {}
    weights: dict[int, float] = {}
    best, best_peak = (), np.inf
    for _ in range(_ROUNDS):
        used = usage(choice)
        if used.max() < best_peak and np.isfinite(problem.cost_of(choice)):
            best, best_peak = choice, float(used.max())
        if best_peak <= enough or not used.any():
            break
        peak = int(np.argmax(used))
        rows.setdefault(peak, row_at(peak))
        weights.setdefault(peak, max(weights.values(), default=1.0))
        weights = {point: weight * np.exp(_RATE * (used[point] / used.max() - 1)) for point, weight in weights.items()}
        total = sum(weights.values())
        messages.weigh({point: (rows[point], weight / total) for point, weight in weights.items()})
        known = sum(rows[point].constant * weight / total for point, weight in weights.items())
        if control is not None and control.is_stopped:
            return best
        bound, choice = messages.iterate(_PASSES)
        if bound + known > hopeless:  # the weighed mean of the points' bytes is at most the peak
            return ()
        choice = messages.improve(choice)
    return best


def _without_costs(problem: Assignment, forbidden: float) -> Assignment:
    """Return the problem with a cost of zero for allowed options and pairs, and of `forbidden` for the rest."""

    def flat(costs: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(costs), 0.0, forbidden)

    edges = tuple(Edge(edge.tail, edge.head, flat(edge.cost)) for edge in problem.edges)
    return dataclasses.replace(problem, costs=tuple(map(flat, problem.costs)), edges=edges, rows=())
