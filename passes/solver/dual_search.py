r"""Search large assignments: near-optimal choices with a proven bound, in time linear in their size.

The Lagrangian of the memory rows, with multipliers :math:`\lambda_t \ge 0`, is a pairwise problem

.. math::  L(\lambda) = \min_x \sum_v c_v[x_v] + \sum_{uv} C_{uv}[x_u, x_v] + \sum_t \lambda_t (m_t(x) - L) ,

whose value under any :math:`\lambda` is a lower bound of the optimum. `Messages` bounds it from below, and rounds to
choices, by sequential tree-reweighted message passing (Kolmogorov, "Convergent Tree-Reweighted Message Passing for
Energy Minimization", 2006): variables are in program order, so the long chains of a program are solved exactly.

1. Pass messages; round; improve the rounding one variable at a time. Keep the cheapest choice that fits.
2. Every choice seen is a cut: :math:`L(\lambda) \le c(x) + \sum_t \lambda_t (m_t(x) - L)`. The multipliers that are
   best under all cuts (Kelley, "The Cutting-Plane Method", 1960), and not too far above the best so far (Marsten, Hogan
   and Blankenship, "The Boxstep Method for Large-Scale Optimization", 1975), averaged with these (Wentges, 1997), come
   next. A program point gets a multiplier when it first is a peak over the limit.
3. Stop when bound and choice meet within the tolerance, when they no longer approach each other, when nothing was found
   that fits for long, after `max_rounds`, or when the search is stopped from outside.
4. Where memory binds: weigh it more, until what messages round to fits; where something does already, that may be left
   out. Take the choices of least Lagrangian that do not fit and cost less than the best that does, and change in each
   the variable that costs least per byte that it saves at the peak, until it fits. Then improve the best choice one
   variable at a time.
5. Before that, where they are still apart: take the best of all choices seen (`merge_choices`). Where nothing fits so
   far, one of a small peak is asked for, if that finds nothing, and rounds go on.
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
    """See the module's docstring.

    Args:
        tolerance: relative gap at which the search is content.
        max_rounds: rounds of message passing at most.
        presses: whether memory is weighed more although something fits.
        merges_above: relative gap above which the best of all choices seen is taken, see `merge_choices`.
        control: told how it goes; may stop it after any round, repair or change.
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
            frugal: asked for a choice of a small peak, or nothing, where none is found that fits.
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
        """Find something that fits; rounds go on with it, as it says how dear bytes are at most."""
        if self.merges_above < math.inf:
            merge(state, self.merges_above)
        choice = frugal() if state.best is None and frugal is not None else ()
        if choice:
            state.offer(choice)
        if state.best is not None and state.gap() > self.tolerance:
            state.run(self.tolerance, self.max_rounds)
