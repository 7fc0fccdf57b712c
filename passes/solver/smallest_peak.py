"""Find a choice of small peak memory in a large assignment, to decide whether any choice fits.

The peak is the maximum of the bytes in use over all program points. Minimising it is a game of two players: one picks
the choice, the other picks weights of the points. In each round, message passing finds a choice whose weighted sum of
bytes is small. Then points with many bytes gain weight (multiplicative weights; Arora, Hazan and Kale, 2012). The
choice with the smallest peak so far is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from passes.solver.assignment import Assignment, Edge, MemoryRow
from passes.solver.messages import Messages

_ROUNDS = 24
_PASSES = 3
"""Number of message passes (each forward and back) between two updates of the weights."""

_RATE = 4.0
_FORBIDDEN = 10.0
"""Cost of a forbidden option, as a multiple of the first choice's peak. Costs are bytes in this search."""


def choice_of_smallest_peak(
    problem: Assignment,
    usage: Callable[[Sequence[int]], np.ndarray],
    row_at: Callable[[int], MemoryRow],
    enough: float = 0.0,
    hopeless: float = np.inf,
) -> tuple[int, ...]:
    """Return the choice with the smallest peak that the search finds, or () if it finds no allowed choice.

    Args:
        problem: the assignment. Its costs only tell which options and pairs are allowed.
        usage: takes a choice, and returns the bytes in use at each program point, [points].
        row_at: takes a program point, and returns its memory row.
        enough: bytes; the search ends at a choice with this peak or less.
        hopeless: bytes; the search returns () once every choice is proven to have a larger peak.
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
        bound, choice = messages.iterate(_PASSES)
        if bound + known > hopeless:  # the weighed mean of the points' bytes is at most the peak
            return ()
        choice = messages.improve(choice)
    return best


def _without_costs(problem: Assignment, forbidden: float) -> Assignment:
    """Return the problem with only two costs: zero if allowed, `forbidden` if forbidden. Memory rows are removed."""

    def flat(costs: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(costs), 0.0, forbidden)

    edges = tuple(Edge(edge.tail, edge.head, flat(edge.cost)) for edge in problem.edges)
    return dataclasses.replace(problem, costs=tuple(map(flat, problem.costs)), edges=edges, rows=())
