r"""Searches large assignments: near-optimal choices with a proven bound, in time linear in their size.

The Lagrangian of the memory rows, with multipliers :math:`\lambda_t \ge 0`, is a pairwise problem

.. math::  L(\lambda) = \min_x \sum_v c_v[x_v] + \sum_{uv} C_{uv}[x_u, x_v] + \sum_t \lambda_t (m_t(x) - L) ,

whose value under any :math:`\lambda` is a lower bound of the optimum. `Messages` bounds it from below, and rounds to
choices. It uses sequential tree-reweighted message passing (Kolmogorov, "Convergent Tree-Reweighted Message Passing for
Energy Minimization", 2006). Variables are in program order, so the long chains of a program are solved exactly.

1. Pass messages; round; improve the rounding one variable at a time. Keep the cheapest choice that fits.
2. Every choice seen is a cut: :math:`L(\lambda) \le c(x) + \sum_t \lambda_t (m_t(x) - L)`. The next multipliers are the
   best under all cuts (Kelley, "The Cutting-Plane Method", 1960). Their distance above the best so far is limited
   (Marsten, Hogan and Blankenship, "The Boxstep Method for Large-Scale Optimization", 1975). They are then averaged
   with the best so far (Wentges, 1997). A program point gets a multiplier at its first peak over the limit.
3. Stop if bound and choice meet within the tolerance, or no longer approach each other. Stop too if no choice fits for
   long, after `max_rounds`, or if `SearchControl` stops the search.
4. If memory binds, raise its weight until the rounded choice fits; this may be skipped if a choice fits already. Take
   the choices of least Lagrangian that do not fit and cost less than the best one that fits. In each, change the
   variable with the least cost per byte saved at the peak, until the choice fits. Then improve the best choice one
   variable at a time.
5. Before step 4, if bound and choice are apart: find the best combination of all choices seen (`merge_choices`). If no
   choice fits so far and none is found, take a choice with a small peak, and go on with the rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from passes.solver.assignment import Assignment, MemoryRow, Solution
from passes.solver.dual_state import DualState, Usage
from passes.solver.merge_choices import merge
from passes.solver.search_control import SearchControl


@dataclass(frozen=True, slots=True)
class DualSearch:
    """The dual search; the module's docstring lists its steps.

    Args:
        tolerance: relative gap at which the search ends.
        max_rounds: rounds of message passing at most.
        presses: whether the weight of memory is raised although a choice fits.
        merges_above: relative gap above which all choices seen are combined, see `merge_choices`.
        control: receives progress; may stop the search after any round, repair or change.
    """

    tolerance: float = 1e-3
    max_rounds: int = 100
    presses: bool = True
    merges_above: float = math.inf
    control: SearchControl = field(default_factory=SearchControl)

    def __call__(
        self,
        problem: Assignment,
        usage: Usage,
        row_at: Callable[[int], MemoryRow],
        start: Sequence[Sequence[int]] = (),
        frugal: Callable[[], Sequence[int]] | None = None,
    ) -> Solution | None:
        """The cheapest choice found that fits, with a proven bound; None if none was found.

        Args:
            problem: the assignment; its rows are ignored, its limit holds.
            usage: bytes in use at every point.
            row_at: the memory row of a point.
            start: choices to begin with, e.g. of known recipes.
            frugal: gives a choice with a small peak, or an empty one; called if no choice fits.
        """
        state = DualState(problem, usage, row_at, self.control)
        for choice in start:
            state.offer(choice)
        finely = min(self.tolerance, self.merges_above)
        state.run(finely, self.max_rounds)
        if state.gap() > finely and (self.presses or state.best is None):
            state.press()
        if state.best is None:
            self._find_any(state, frugal)
        if state.gap() > finely:
            state.repair()
        if state.gap() > self.merges_above:
            merge(state, self.merges_above)
        state.polish()
        return state.solution()

    def _find_any(self, state: DualState, frugal: Callable[[], Sequence[int]] | None) -> None:
        """Find a choice that fits. Rounds go on with it, since its cost bounds the multipliers."""
        if self.merges_above < math.inf:
            merge(state, self.merges_above)
        choice = frugal() if state.best is None and frugal is not None else ()
        if choice:
            state.offer(choice)
        if state.best is not None and state.gap() > self.tolerance:
            state.run(self.tolerance, self.max_rounds)
