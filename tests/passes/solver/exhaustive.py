"""Solve an assignment by trying every choice: the oracle that the other solver is tested against."""

from __future__ import annotations

from itertools import product

import numpy as np

from passes.solver.assignment import Assignment, Solution


def solve_exhaustive(problem: Assignment) -> Solution | None:
    """The cheapest choice that fits (the first among equals), or None if none does."""
    best: Solution | None = None
    for choice in product(*(range(len(cost)) for cost in problem.costs)):
        cost = problem.cost_of(choice)
        if np.isfinite(cost) and (best is None or cost < best.cost) and problem.fits(choice):
            best = Solution(choice, cost, cost)
    return best
