"""The state of `dual_search`: its best choice, bound and multipliers, and the steps that improve them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from passes.solver.assignment import Assignment, Floats, MemoryRow, Solution
from passes.solver.messages import Messages
from passes.solver.quiet_highs import QuietHighs
from passes.solver.search_control import SearchControl

Usage = Callable[[Sequence[int]], np.ndarray]
"""A function that takes a choice and returns the bytes in use at every program point, [points]."""


_MOST_FACTORS = 8
"""The most factors on the multipliers that one call of `DualState.raise_multipliers` tries."""

_REACH = 0.03
"""Initial value of `DualState.reach`."""

_PASSES = 4
"""Number of message passes (each forward and back) between two updates of the multipliers."""


@dataclass(slots=True)
class DualState:
    """A Lagrangian search for the cheapest choice in `problem` that fits (`dual_search`), changed in place.

    Args:
        rows: program point → its memory row, for the points that have a multiplier.
        multipliers: program point → current multiplier, in seconds per byte.
        best_multipliers: program point → the multiplier that gave `bound`.
        cuts: cost in seconds, bytes at each program point, and options of each choice seen so far.
        best, best_cost: the cheapest seen choice that fits, and its cost in seconds.
        bound: proven lower bound of the optimum, in seconds.
        distances: `best_cost / bound - 1` after each round.
        reach: the most by which a new multiplier may exceed its best value. Its unit is (highest cost of a seen choice)
            / (most bytes by which a seen choice misses the memory limit).
        is_far: whether the last update of the multipliers raised any of them by `reach`.
    """

    problem: Assignment
    usage: Usage
    row_at: Callable[[int], MemoryRow]
    control: SearchControl
    messages: Messages = field(init=False)
    rows: dict[int, MemoryRow] = field(default_factory=dict)
    multipliers: dict[int, float] = field(default_factory=dict)
    best_multipliers: dict[int, float] = field(default_factory=dict)
    cuts: list[tuple[float, np.ndarray, tuple[int, ...]]] = field(default_factory=list)
    best: tuple[int, ...] | None = None
    best_cost: float = np.inf
    bound: float = -np.inf
    distances: list[float] = field(default_factory=list)
    reach: float = _REACH
    is_far: bool = False

    def __post_init__(self) -> None:
        self.messages = Messages(self.problem)

    def run(self, tolerance: float, rounds: int) -> None:
        """Run up to `rounds` rounds.

        End early if the relative gap is within `tolerance`, or if rounds no longer help.
        """
        for _ in range(rounds):
            self.round()
            self.control.note(self.best_cost, self.bound)
            if self.gap() <= tolerance or self.has_stalled() or self.finds_nothing() or self.control.is_over():
                return

    def row(self, point: int) -> MemoryRow:
        """Return the memory row of a program point: the row in `rows`, else `row_at(point)`, which is not recorded."""
        return self.rows[point] if point in self.rows else self.row_at(point)

    def round(self) -> None:
        """Pass messages, and read a choice off them. If there is a memory limit, also update the multipliers."""
        raw, choice = self.messages.iterate(_PASSES)
        bound = raw - self._offset()
        self.offer(choice)
        self.offer(self.messages.improve(choice))
        self._set_reach(bound > self.bound)
        if bound > self.bound:
            self.bound, self.best_multipliers = bound, dict(self.multipliers)
        self.distances.append(self.best_cost / self.bound - 1 if self.bound > 0 else np.inf)
        if np.isfinite(self.problem.limit):
            self._move_multipliers()

    def _set_reach(self, is_better: bool) -> None:
        """Multiply the reach by `_FURTHER` after a better bound, and divide it by `_FURTHER` after a worse bound.

        The reach stays the same if no multiplier rose by the full reach in the last update.
        """
        if self.is_far:
            self.reach *= _FURTHER if is_better else 1 / _FURTHER

    def has_stalled(self) -> bool:
        """Whether a choice fits, and the gap has shrunk by less than 3 % over the last `_PATIENCE` rounds.

        The gap is `best_cost / bound - 1`. A gap relative to a bad choice's cost would hardly show a doubled bound.
        """
        found = self.distances
        return len(found) > _PATIENCE and found[-1] > 0.97 * found[-_PATIENCE] and np.isfinite(found[-1])

    def finds_nothing(self) -> bool:
        """Whether no seen choice fits after `_HOPEFUL` rounds."""
        return len(self.distances) >= _HOPEFUL and self.best is None

    def _offset(self) -> float:
        """Return the sum over points of multiplier * (limit - constant bytes), in seconds.

        The bound of the messages, less this sum, is the bound of the problem.
        """
        return sum(weight * (self.problem.limit - self.rows[p].constant) for p, weight in self.multipliers.items())

    def offer(self, choice: Sequence[int]) -> None:
        """Record a choice among `cuts`, and as `best` if it fits and is cheaper than the best so far.

        A choice of infinite cost is ignored. If the choice exceeds the memory limit, the program point of its peak
        gets a multiplier, up to `_POINTS_WEIGHED` points.
        """
        used, cost = self.usage(choice), self.problem.cost_of(choice)
        if not np.isfinite(cost):
            return
        self.cuts.append((cost, used, tuple(choice)))
        peak = int(np.argmax(used))
        if used[peak] > self.problem.limit:
            if peak not in self.rows and len(self.rows) < _POINTS_WEIGHED:
                self.rows[peak] = self.row_at(peak)
        elif cost < self.best_cost:
            self.best, self.best_cost = tuple(choice), cost

    def _move_multipliers(self) -> None:
        if not self.rows or not self.cuts:
            return
        points = sorted(self.rows)
        slack = np.array([used[points] - self.problem.limit for _, used, _ in self.cuts])
        previous = np.array([self.best_multipliers.get(point, 0.0) for point in points])
        costs = np.array([cost for cost, _, _ in self.cuts])
        ideal, self.is_far = _best_multipliers(costs, slack, previous, self.reach)
        self.multipliers = dict(zip(points, (0.5 * (previous + ideal)).tolist(), strict=True))
        self.weigh()

    def weigh(self) -> None:
        """Give the current multipliers to the messages, as prices of memory."""
        self.messages.weigh({point: (self.rows[point], weight) for point, weight in self.multipliers.items()})

    def raise_multipliers(self) -> None:
        """Search for the smallest factor on all best multipliers with which message passing gives a choice that fits.

        Each choice on the way is offered (`offer`). Afterwards the multipliers are `best_multipliers` again.
        """
        if not any(self.best_multipliers.values()):
            return
        too_few, enough, times = 1.0, math.inf, 2.0
        for _ in range(_MOST_FACTORS):
            if self.control.is_over():
                break
            self.multipliers = {point: times * weight for point, weight in self.best_multipliers.items()}
            self.weigh()
            _, choice = self.messages.iterate(_PASSES)
            improved = self.messages.improve(choice)
            self.offer(choice)
            self.offer(improved)
            if self.usage(improved).max() <= self.problem.limit:
                enough = times
            else:
                too_few = times
            times = 2 * times if math.isinf(enough) else math.sqrt(too_few * enough)
        self.multipliers = dict(self.best_multipliers)
        self.weigh()

    def polish(self) -> None:
        """Change single options of the best choice, as long as a change is cheaper and the choice still fits.

        Nothing changes if no choice seen so far exceeded the memory limit.
        """
        changed = self.best is not None and bool(self.rows)
        while changed and not self.control.is_over():
            changed = False
            for variable in range(len(self.problem.costs)):
                changed |= not self.control.is_over() and self._polish_variable(variable)

    def _polish_variable(self, variable: int) -> bool:
        assert self.best is not None
        costs = self.messages.costs_given_neighbours(variable, self.best)
        for option in np.argsort(costs, kind="stable"):
            if costs[option] >= costs[self.best[variable]] * (1 - 1e-12):
                return False
            tried = (*self.best[:variable], int(option), *self.best[variable + 1 :])
            if self.usage(tried).max() <= self.problem.limit:
                self.best_cost += float(costs[option] - costs[self.best[variable]])
                self.best = tried
                return True
        return False

    def gap(self) -> float:
        """Return (best cost - bound) / best cost, or infinity if no choice fits yet."""
        if not np.isfinite(self.best_cost):
            return np.inf
        return (self.best_cost - self.bound) / self.best_cost if self.best_cost > 0 else 0.0

    def solution(self) -> Solution | None:
        if self.best is None:
            return None
        return Solution(self.best, self.best_cost, min(self.best_cost, max(self.bound, 0.0)))


_PATIENCE = 8
"""The search ends if the gap shrinks by less than 3 % of itself within this number of rounds."""

_HOPEFUL = 24
"""The search ends if no choice fits after this number of rounds."""

_FURTHER = 3.0
"""Factor by which `DualState.reach` grows after a better bound, and shrinks after a worse bound.

Until a choice fits, only the reach limits the multipliers. Far too large multipliers give bad choices.
"""

_NEAREST = 1.0
"""Fraction of the largest best multiplier by which each multiplier may exceed its best value, whatever the reach."""

_POINTS_WEIGHED = 16
"""The most program points that get a multiplier. A training step of 139 nodes needs 3.

The bound is true with any number of points. Choices that exceed the limit at other points are dropped, or combined
with others (`merge_choices`).
"""


def _best_multipliers(costs: Floats, slack: Floats, previous: Floats, reach: float) -> tuple[Floats, bool]:
    """Return the multipliers that maximise the smallest cut, and whether any multiplier reached its upper limit.

    A cut is the cost of a seen choice plus multipliers times its bytes above the memory limit. Multipliers are found
    by a linear program, in units of (highest cost) / (most bytes by which a choice misses the memory limit). Each may
    exceed its previous value by `reach` units, or by `_NEAREST` times the largest previous value.

    Args:
        costs: seconds of each seen choice, [cuts].
        slack: bytes of each seen choice above the memory limit, negative if below, [cuts, points].
        previous: the best multipliers so far, seconds per byte, [points].
    """
    unit_cost, unit_bytes = float(costs.max()) or 1.0, float(np.abs(slack).max()) or 1.0
    count, before = slack.shape[1], previous * unit_bytes / unit_cost
    most = before + max(reach, _NEAREST * float(before.max()))
    program = QuietHighs()
    program.addVars(count + 1, np.append(np.zeros(count), -np.inf), np.append(most, np.inf))
    program.changeColCost(count, 1.0)
    places = np.arange(count + 1, dtype=np.int32)
    for cost, row in zip(costs / unit_cost, slack / unit_bytes, strict=True):
        program.addRow(-np.inf, float(cost), count + 1, places, np.append(-row, 1.0))
    program.changeObjectiveSense(highspy.ObjSense.kMaximize)
    program.run()
    found = np.array(program.getSolution().col_value)[:count]
    return np.maximum(found, 0.0) * unit_cost / unit_bytes, bool((found >= most).any())
