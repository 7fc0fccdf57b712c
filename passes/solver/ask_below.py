r"""Close the gap of an assignment by asking whether anything costs less than a target between bound and incumbent.

Where memory binds, the Lagrangian bound (`dual_search`) can lie far below the optimum: it mixes choices that fit with
ones that do not. A mixed-integer program knows better, but takes long as long as most options may still be part of a
solution. Below a target few may, so:

1. The target is the geometric mean of bound and incumbent, if that is not too far from the bound; where they are near
   each other, it is just below the incumbent.
2. Options and pairs go that no choice below the target has (`narrow_assignment`), first by what the messages say of
   them, which is there already, then by what the linear relaxation says.
3. The rest is solved (`solve_milp`), with memory rows as they are needed, until nothing is left, and the target is a
   bound; or what is found fits: it is the incumbent, and the solver's bound is one of all, if that is lower.
4. Where neither is clear after some effort, the next target is nearer to the bound, which is easier, and more effort is
   allowed.

Effort is counted in nodes of the solver's tree, so what is found depends on time only where that is up.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field

import numpy as np

from passes.solver.assignment import Assignment, row_against
from passes.solver.dual_state import DualState
from passes.solver.least_peak import highest_over
from passes.solver.narrow_assignment import narrow, narrow_by
from passes.solver.solve_milp import Effort, Multipliers, solve_milp

_MOST_PAIRS = 150_000
"""Pairs of options that may be left by messages, over all edges, for the rest to be solved."""

_STEP = 1.1
"""How many times the bound a target is at most: what is asked of one that is far above the optimum takes long."""

_NODES = 100
"""Nodes of the solver's tree at first."""

_NEAR = 4
"""How many times the tolerance the gap is where the target is just below the incumbent."""

_ROUNDING = 1e-8
"""Part of a target by which a solver may be wrong."""

_LEAST = 1e-3
"""Part of the incumbent that stands for a bound which is next to nothing."""


def ask_below(state: DualState, tolerance: float, most: int, deadline: float) -> None:
    """Raise the bound of a state, and improve its incumbent, until they meet within a tolerance.

    Args:
        state: with an incumbent; without one nothing is done.
        tolerance: relative gap at which the search is content.
        most: targets at most.
        deadline: of `time.monotonic`, after which no target is tried.
    """
    if state.best is None or state.gap() <= tolerance or most == 0 or state.is_over(deadline):
        return
    asking = _Asking(state, tolerance, deadline, state.found_multipliers())
    target = asking.target(state.best_cost)
    for _ in range(most):
        is_clear = asking.ask(target)
        state.control.note(state.best_cost, state.bound)
        target = asking.target(state.best_cost if is_clear else target)
        if state.gap() <= tolerance or state.is_over(deadline) or target <= state.bound * (1 + 0.1 * tolerance):
            return


@dataclass
class _Asking:
    state: DualState
    tolerance: float
    deadline: float
    multipliers: Multipliers
    nodes: int = _NODES
    problem: Assignment = field(init=False)

    def __post_init__(self) -> None:
        self.problem = dataclasses.replace(self.state.problem, rows=tuple(self.state.rows.values()))
        self.points = set(self.state.rows)
        self.known = len(self.problem.rows)

    def target(self, above: float) -> float:
        """A target between the bound and a cost."""
        bound = max(self.state.bound, _LEAST * above)
        if above <= bound * (1 + _NEAR * self.tolerance):
            return above * (1 - 0.5 * self.tolerance)
        return min(math.sqrt(bound * above), _STEP * bound)

    def ask(self, target: float) -> bool:
        """Whether it became clear if anything that fits costs less than a target."""
        left = narrow_by(self._with_known_rows(), self.multipliers, target)
        if left is not None and _pairs(left) > _MOST_PAIRS:
            return False
        try:
            while left is not None and not self.state.is_over(self.deadline):
                left = narrow(dataclasses.replace(left, rows=self.problem.rows), target, self.deadline)
                if left is not None and self._is_solved(left, target):
                    return True
        except TimeoutError:
            self.nodes *= 2
            return False
        if left is None:
            self._raise(target)
        return left is None

    def _is_solved(self, left: Assignment, target: float) -> bool:
        """Whether what is left has a cheapest choice that fits, or none; if not, its rows are added."""
        effort = Effort(0.5 * self.tolerance, self.nodes)
        left_s = self.deadline - time.monotonic()
        found = solve_milp(left, time_limit_s=left_s, control=self.state.control, below=target, effort=effort)
        if found is None or found.lower_bound >= target:
            self._raise(target)
            return True
        self._raise(found.lower_bound)
        return not self._refuse(found.choice)

    def _with_known_rows(self) -> Assignment:
        """The problem with the rows that multipliers are of."""
        return dataclasses.replace(self.problem, rows=self.problem.rows[: self.known])

    def _raise(self, bound: float) -> None:
        state = self.state
        state.bound = min(state.best_cost, max(state.bound, bound * (1 - _ROUNDING)))

    def _refuse(self, choice: tuple[int, ...]) -> bool:
        """Add rows that a choice breaks; whether there are any. It is the incumbent if there are none."""
        limit = self.state.problem.limit
        over = set(highest_over(self.state.usage(choice), limit))
        if not over:
            self.state.offer(choice)
            return False
        rows = [self.state.row(point) for point in sorted(over - self.points)]
        rows = rows or [row_against(choice, self.problem.costs, limit)]
        self.points |= over
        self.problem = dataclasses.replace(self.problem, rows=(*self.problem.rows, *rows))
        return True


def _pairs(problem: Assignment) -> int:
    """Pairs of options that are left."""
    return sum(int(np.isfinite(edge.cost).sum()) for edge in problem.edges)
