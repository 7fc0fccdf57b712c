r"""Search a large assignment for a near-optimal choice with a proven bound, in time linear in the assignment's size.

The Lagrangian of the memory rows :math:`m_t(x) \le L`, with multipliers :math:`\lambda_t \ge 0`, is a pairwise problem

.. math::  L(\lambda) = \min_x \sum_v c_v[x_v] + \sum_{uv} C_{uv}[x_u, x_v] + \sum_t \lambda_t (m_t(x) - L) ,

whose value under any :math:`\lambda` is a lower bound of the optimum. `Messages` bounds this value from below, and
rounds its messages to choices. It uses sequential tree-reweighted message passing (Kolmogorov, "Convergent
Tree-Reweighted Message Passing for Energy Minimization", 2006). Variables are in program order, so the long chains of
a program are solved exactly.

1. Pass messages. Round them to a choice. Improve the choice one variable at a time. Keep the cheapest choice that fits.
2. Every seen choice is a cut: :math:`L(\lambda) \le c(x) + \sum_t \lambda_t (m_t(x) - L)`. Find the multipliers that
   are best under all cuts (Kelley, "The Cutting-Plane Method", 1960). They may exceed the best multipliers so far only
   by a margin (Marsten, Hogan and Blankenship, "The Boxstep Method for Large-Scale Optimization", 1975). Continue with
   the average of the new and the best multipliers (Wentges, 1997). A program point gets a multiplier when it first is
   the peak of a choice that exceeds the limit.
3. Stop when the gap between bound and choice is within the tolerance or no longer shrinks. Stop also when no choice has
   fit for long, after `max_rounds`, or when the caller stops the search.
4. If memory binds, raise the multipliers until the rounded choice fits. A search that already has a choice may skip
   this step.
5. If no choice fits even then, ask the caller for a choice of a small peak, and continue with step 1.
6. If the gap is still large, combine the seen choices into a cheaper choice that fits (`merge_choices`).
7. Improve the best choice one variable at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from passes.solver.assignment import Assignment, MemoryRow, Solution
from passes.solver.dual_state import DualState, Usage
from passes.solver.merge_choices import merge
from passes.solver.search_control import SearchControl


@dataclass(frozen=True, slots=True)
class DualSearch:
    """The search in the module's docstring, with its options.

    Args:
        tolerance: relative gap between choice and bound at which the search ends.
        max_rounds: the most rounds of message passing.
        raises_multipliers: whether to raise the multipliers (step 4) even if a choice already fits.
        control: receives the best cost and the bound after each round, and may stop the search.
    """

    tolerance: float = 1e-3
    max_rounds: int = 100
    raises_multipliers: bool = True
    control: SearchControl = field(default_factory=SearchControl)

    def __call__(
        self,
        problem: Assignment,
        usage: Usage,
        row_at: Callable[[int], MemoryRow],
        start: Sequence[Sequence[int]] = (),
        find_small_peak: Callable[[], Sequence[int]] | None = None,
    ) -> Solution | None:
        """Return the cheapest found choice that fits, with a proven lower bound, or None if no found choice fits.

        Args:
            problem: the assignment. Its memory limit holds; its memory rows are ignored in favour of `row_at`.
            usage: takes a choice, and returns the bytes in use at each program point, [points].
            row_at: takes a program point, and returns its memory row.
            start: choices to begin with, e.g. of known recipes.
            find_small_peak: called if no choice fits; returns a choice of small peak memory, or () if it finds none.
        """
        state = DualState(problem, usage, row_at, self.control)
        for choice in start:
            state.offer(choice)
        state.run(self.tolerance, self.max_rounds)
        if state.gap() > self.tolerance and (self.raises_multipliers or state.best is None):
            state.raise_multipliers()
        if state.best is None and find_small_peak is not None and (choice := find_small_peak()):
            state.offer(choice)
            if state.best is not None:  # the cost of a choice that fits limits the multipliers
                state.run(self.tolerance, self.max_rounds)
        if state.gap() > self.tolerance:
            merge(state, self.tolerance)
        state.polish()
        return state.solution()
