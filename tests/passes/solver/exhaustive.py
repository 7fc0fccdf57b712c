"""Solve an assignment by trying every choice, as the reference of the search."""

from __future__ import annotations

from itertools import product

import numpy as np

from passes.solver.assignment import Assignment, Solution


def solve_exhaustive(problem: Assignment) -> Solution | None:
    """Return the cheapest fitting choice, the first among equals; None if no choice of finite cost fits."""
    best: Solution | None = None
    for choice in product(*(range(len(cost)) for cost in problem.costs)):
        cost = problem.cost_of(choice)
        if np.isfinite(cost) and (best is None or cost < best.cost) and problem.fits(choice):
            best = Solution(choice, cost, cost)
    return best
