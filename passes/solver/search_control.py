"""The channel between a running search and its user: progress one way, and a request to stop the other.

Searches end by counted work (rounds, nodes of a tree, attempts), so that a question has one answer on every machine.
The user's time budget is a ceiling over all searches of a plan. If the ceiling cuts a search short, a warning says so,
since the plan may differ on another day.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

_LOGGER = logging.getLogger(__name__)

ALL_PLANS = "all plans"


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a search.

    Args:
        problem: the name of the problem: a known recipe, or the whole.
        best: the cheapest choice so far that fits, seconds; infinite if there is none yet.
        lower_bound: a proven lower bound of every choice's cost, seconds.
    """

    problem: str
    best: float
    lower_bound: float


@dataclass(slots=True)
class Ceiling:
    """The most time that the searches for a plan may take together.

    Args:
        until: a time of `time.monotonic`.
        has_cut: whether the ceiling has cut a search short.
    """

    until: float = math.inf
    has_cut: bool = False

    @classmethod
    def within(cls, seconds: float) -> Self:
        """The ceiling for searches that begin now."""
        return cls(time.monotonic() + seconds)

    def cuts(self) -> bool:
        """Whether the time is over. Call it only before a search would go on, since it notes that a search was cut."""
        if not self.has_cut and time.monotonic() >= self.until:
            self.has_cut = True
            _LOGGER.warning(
                "time_budget_s was over before the search for a plan ended. A larger time_budget_s, or a faster or "
                "less busy machine, may give a better plan"
            )
        return self.has_cut


_STOPPED = "the search was stopped before its problem was built"


class SearchStopped(KeyboardInterrupt):
    """A search was stopped before its problem was built, so there is no choice."""


@dataclass(slots=True)
class SearchControl:
    """The control of all searches for one plan.

    Args:
        show: receives the progress of the search now and then.
        is_stopped: set from outside; searches then end as soon as they have a choice.
        problem: the name of the current problem.
        is_building: whether a problem is being built; see `building`.
        ceiling: the ceiling of all searches for the plan.
    """

    show: Callable[[Progress], None] | None = None
    is_stopped: bool = False
    problem: str = ALL_PLANS
    is_building: bool = False
    ceiling: Ceiling = field(default_factory=Ceiling)

    @classmethod
    def within(cls, seconds: float) -> Self:
        """The control for a search that begins now, and may take `seconds`."""
        return cls(ceiling=Ceiling.within(seconds))

    def is_over(self) -> bool:
        """Whether to go no further; see `Ceiling.cuts`."""
        return self.is_stopped or self.ceiling.cuts()

    def stop(self) -> None:
        """Stop the search from a signal's handler; a `SearchStopped` where a problem is being built."""
        self.is_stopped = True
        if self.is_building:
            raise SearchStopped(_STOPPED)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Within, `stop` raises: there is nothing yet that could be given.

        Raises:
            SearchStopped: the search is stopped already, or while the problem is built.
        """
        if self.is_stopped:
            raise SearchStopped(_STOPPED)
        self.is_building = True
        try:
            yield
        finally:
            self.is_building = False

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Show no progress within this context, since a bound of a part of a problem is no bound of the whole."""
        show, self.show = self.show, None
        try:
            yield
        finally:
            self.show = show

    def note(self, best: float, lower_bound: float) -> None:
        """Show how the search stands."""
        if self.show is not None:
            self.show(Progress(self.problem, best, max(0.0, lower_bound)))
