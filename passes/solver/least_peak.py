"""Find the smallest peak memory of an assignment, with proof: what decides whether anything fits, and what would.

The peak is the maximum over program points. Which ones matter is not known before, so rows are added in rounds:

1. Solve for the smallest peak over the rows so far (`smallest_peak`), whatever it costs: no choice has a smaller one.
2. What solves this may take much at other points. So change one variable at a time, as long as it then takes less.
3. Count both. A choice that takes no more than 1. says has the smallest peak of all; else add rows of the points at
   which they take most, one at least that what was solved breaks, and go on.

A search that runs out of time, or is stopped, gives the smallest peak so far, and what is proven. So does one that has
found a peak which is small enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from passes.solver.assignment import Assignment, Floats, MemoryRow
from passes.solver.search_control import SearchControl
from passes.solver.solve_milp import smallest_peak

Usage = Callable[[Sequence[int]], Floats]
"""Bytes in use at every program point under a choice, [points]."""


class Counted(Protocol):
    """The memory under one choice."""

    def used(self) -> Floats:
        """Bytes in use on each rank at every program point, [points]."""
        ...

    def row(self, point: int) -> MemoryRow:
        """A row that is exact for the choice at one point, and counts no more than there is under all others."""
        ...


@dataclass(frozen=True, slots=True)
class LeastPeak:
    """A choice with a small peak.

    Args:
        choice: one option per variable.
        peak: the most that it takes, bytes.
        bound: no choice has a smaller peak, bytes.
    """

    choice: tuple[int, ...]
    peak: float
    bound: float

    @property
    def is_proven(self) -> bool:
        """Whether no choice has a smaller peak: none differs by less than a byte."""
        return self.peak < self.bound + 1


@dataclass
class PeakSearch:
    """See the module's docstring.

    Args:
        problem: the assignment, whose rows are true of all choices.
        counted: the count that matters.
        usage: another one, maybe not as exact, but quick.
        deadline: of `time.monotonic`.
        control: may stop it.
        enough: bytes; a smaller peak than that is not looked for.
    """

    problem: Assignment
    counted: Callable[[Sequence[int]], Counted]
    usage: Usage
    deadline: float
    control: SearchControl
    enough: float = 0.0
    best: tuple[int, ...] | None = field(default=None, init=False)
    best_peak: float = field(default=np.inf, init=False)
    bound: float = field(default=0.0, init=False)

    def __call__(self, start: Sequence[int]) -> LeastPeak | None:
        """The smallest peak; None if no choice is allowed.

        Args:
            start: a choice with a small peak, or nothing.

        Raises:
            TimeoutError: no choice was found in time.
        """
        descend = _Descent(self.problem, self.usage, self._is_over)
        if start:
            self._note(start)
        if start and not self._is_done:
            self._add_rows(descend(start, 0.9 * float(self.usage(start).max())), 0.0)
        while not self._is_done:
            try:
                found = smallest_peak(self.problem, self.deadline - time.monotonic(), self.control)
            except TimeoutError:
                break
            if found is None:
                return None
            self.bound = max(self.bound, found.bound)
            if self.best_peak <= found.peak or not self._refute(found.choice, descend(found.choice, found.peak)):
                break
        if self.best is None:
            raise TimeoutError("no plan was found in time, whatever memory it takes")
        return LeastPeak(self.best, self.best_peak, self.bound)

    @property
    def _is_done(self) -> bool:
        """Whether there is nothing left to find, or no time."""
        return self.best_peak <= self.enough or self._is_over()

    def _is_over(self) -> bool:
        return self.control.is_stopped or time.monotonic() >= self.deadline

    def _refute(self, solved: tuple[int, ...], near: tuple[int, ...]) -> bool:
        """Add rows that what was solved breaks; whether there are any."""
        known = max((row.bytes_of(solved, self.problem.edges) for row in self.problem.rows), default=0.0)
        added = self._add_rows(near, known)
        if any(row.bytes_of(solved, self.problem.edges) > known for row in added):
            return True
        return bool(self._add_rows(solved, known))

    def _add_rows(self, choice: tuple[int, ...], peak: float) -> Sequence[MemoryRow]:
        """Note a choice, and add the rows of the points where it takes most, if that is over a peak."""
        counted = self._note(choice)
        added = tuple(counted.row(point) for point in highest_over(counted.used(), peak))
        self.problem = replace(self.problem, rows=(*self.problem.rows, *added))
        return added

    def _note(self, choice: Sequence[int]) -> Counted:
        """Count a choice; it is the best so far if its peak is."""
        counted = self.counted(choice)
        peak = float(counted.used().max())
        if peak < self.best_peak:
            self.best, self.best_peak = tuple(choice), peak
        return counted


_MOST_PEAKS = 4
"""Points whose rows are added at a time."""


def highest_over(used: np.ndarray, limit: float) -> list[int]:
    """The points of the highest peaks over a limit: of each run of points over it, the highest."""
    over = np.flatnonzero(used > limit)
    if not len(over):
        return []
    runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    peaks = (int(run[np.argmax(used[run])]) for run in runs)
    return sorted(peaks, key=lambda point: -used[point])[:_MOST_PEAKS]


_SWEEPS = 4
"""Times that each variable is looked at."""


@dataclass
class _Descent:
    """Changes one variable of a choice at a time, until it `is_over`."""

    problem: Assignment
    usage: Usage
    is_over: Callable[[], bool]

    def __post_init__(self) -> None:
        self._allowed = [np.isfinite(cost) for cost in self.problem.costs]
        self._beside: list[list[tuple[int, np.ndarray]]] = [[] for _ in self._allowed]
        for edge in self.problem.edges:
            self._beside[edge.tail].append((edge.head, np.isfinite(edge.cost).T))
            self._beside[edge.head].append((edge.tail, np.isfinite(edge.cost)))

    def __call__(self, start: Sequence[int], peak: float) -> tuple[int, ...]:
        """A choice, near `start`, whose bytes over a peak, summed over all points, are fewer, if there is one."""
        choice, left = list(start), self._over(start, peak)
        for _ in range(_SWEEPS):
            before = left
            for variable in range(len(choice)):
                left = self._improve(choice, variable, peak, left)
                if not left or self.is_over():
                    return tuple(choice)
            if left == before:
                break
        return tuple(choice)

    def _improve(self, choice: list[int], variable: int, peak: float, left: float) -> float:
        """Give a variable its best option; the bytes over the peak that are left."""
        best = choice[variable]
        fits = np.logical_and.reduce(
            [self._allowed[variable], *(table[choice[other]] for other, table in self._beside[variable])]
        )
        for option in np.flatnonzero(fits):
            choice[variable] = int(option)
            over = self._over(choice, peak)
            if over < left:
                best, left = int(option), over
        choice[variable] = best
        return left

    def _over(self, choice: Sequence[int], peak: float) -> float:
        return float(np.maximum(self.usage(choice) - peak, 0.0).sum())
