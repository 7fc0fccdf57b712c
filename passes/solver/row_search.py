"""Search a small problem to the proven optimum, with memory rows added as they are needed.

Memory binds at few program points, and which ones is not known before. So: solve; count what the solution takes; where
that is over the limit, add rows that it breaks, and solve again. Each problem that is solved is a relaxation of the
true one: so the first solution that fits is optimal, and if nothing solves nothing fits.

Where a choice that fits is known, only what is cheaper is asked for, and what no cheaper choice has is forbidden before
each solve (`narrow_assignment`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from passes.solver.assignment import Assignment, Solution, row_against
from passes.solver.least_peak import Counted, highest_over
from passes.solver.narrow_assignment import narrow
from passes.solver.search_control import SearchControl
from passes.solver.solve_milp import WHATEVER_IT_TAKES, Effort, solve_milp

_ROUNDING_COSTS = 1e-9
"""Part of the costs by which a solver may be wrong: what differs by less is as cheap."""


@dataclass(slots=True)
class RowSearch:
    """See the module's docstring.

    Args:
        counted: counts the memory of a choice.
        problem: the assignment, with a limit, and the rows so far.
        deadline: of `time.monotonic`.
        control: told the bound; may stop the search.
        known: seconds that a choice costs which fits, than which others are to be cheaper.
        effort: what each solve may take.
        refused: choices that did not fit, whose rows the problem has.
    """

    counted: Callable[[Sequence[int]], Counted]
    problem: Assignment
    deadline: float
    control: SearchControl
    known: float = np.inf
    effort: Effort = WHATEVER_IT_TAKES
    refused: set[tuple[int, ...]] = field(default_factory=set)

    def cheapest(self) -> tuple[Solution | None, float]:
        """The cheapest choice that fits, None if none is found in time; and seconds that no choice is below."""
        bound = 0.0
        while not self.control.is_stopped and time.monotonic() < self.deadline:
            try:
                solution = self._solved()
            except TimeoutError:
                break
            if solution is None:
                return None, self.known
            bound = max(bound, solution.lower_bound)
            if self._fits(solution.choice):
                return solution, bound
        return None, bound

    def _solved(self) -> Solution | None:
        """The cheapest choice as far as rows are known; None if none is cheaper than what is known to fit."""
        below = self.known * (1 - _ROUNDING_COSTS)
        if self.known < np.inf:
            narrowed = narrow(self.problem, below, self.deadline)
            if narrowed is None:
                return None
            self.problem = narrowed
        left_s = self.deadline - time.monotonic()
        return solve_milp(self.problem, time_limit_s=left_s, control=self.control, below=below, effort=self.effort)

    def _fits(self, choice: Sequence[int]) -> bool:
        """Whether a choice fits; if not, rows are added that cut it off."""
        counted, limit = self.counted(choice), self.problem.limit
        rows = [counted.row(point) for point in highest_over(counted.used(), limit)]
        if rows and tuple(choice) in self.refused:
            rows = [row_against(choice, self.problem.costs, limit)]
        self.refused.add(tuple(choice))
        self.problem = dataclasses.replace(self.problem, rows=(*self.problem.rows, *rows))
        return not rows
