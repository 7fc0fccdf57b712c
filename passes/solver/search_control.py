"""Show the progress of a running search to its user, and let the user end it.

Searches end by counted work (rounds, attempts), so every machine finds the same plan. The user's time
budget is a ceiling over all searches for a plan. If the ceiling ends a search early, `Ceiling.has_cut` is set, because
a faster machine may then find another plan.
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
class SearchProgress:
    """The progress of one search for a plan, as shown to the user.

    Args:
        problem: a known recipe's name, or `ALL_PLANS`.
        best: seconds of the cheapest choice so far that fits; infinite before the first.
        lower_bound: seconds; no choice of the problem costs less.
    """

    problem: str
    best: float
    lower_bound: float


@dataclass(slots=True)
class Ceiling:
    """The time at which all searches for one plan end, in seconds of `time.monotonic`.

    Args:
        until: the time; infinite without a limit.
        has_cut: whether the limit has ended a search early.
    """

    until: float = math.inf
    has_cut: bool = False

    @classmethod
    def within(cls, seconds: float) -> Self:
        """Return a ceiling that ends all searches for a plan `seconds` from now."""
        return cls(time.monotonic() + seconds)

    def cuts(self) -> bool:
        """Return whether time is up. The first time it is, set `has_cut` and log a warning.

        Call this only where a search would go on.
        """
        if not self.has_cut and time.monotonic() >= self.until:
            self.has_cut = True
            _LOGGER.warning(
                "time_budget_s was over before the search for a plan ended. A larger time_budget_s, or a faster or "
                "less busy machine, may give a better plan"
            )
        return self.has_cut


_STOPPED = "the search was stopped before its problem was built"


class SearchStopped(KeyboardInterrupt):
    """The user stopped a search before its problem was built, so the search cannot return a choice."""


@dataclass(slots=True)
class SearchControl:
    """The control of all searches for one plan.

    Args:
        show: called from time to time with the progress of the search.
        is_stopped: whether searches end as soon as they have a choice. `stop` sets it.
        problem: name of the problem that is searched now, as in `SearchProgress`.
        is_building: whether a problem is being built, so that no choice exists yet.
        ceiling: the time limit, shared with other searches for the same plan.
    """

    show: Callable[[SearchProgress], None] | None = None
    is_stopped: bool = False
    problem: str = ALL_PLANS
    is_building: bool = False
    ceiling: Ceiling = field(default_factory=Ceiling)

    @classmethod
    def within(cls, seconds: float) -> Self:
        """Return a control that ends searches `seconds` from now."""
        return cls(ceiling=Ceiling.within(seconds))

    def is_over(self) -> bool:
        """Whether the search has to end, because the user stopped it or its time is up."""
        return self.is_stopped or self.ceiling.cuts()

    def stop(self) -> None:
        """Stop the search; a signal's handler calls this.

        Raises:
            SearchStopped: a problem is being built, so no choice exists yet.
        """
        self.is_stopped = True
        if self.is_building:
            raise SearchStopped(_STOPPED)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Mark that a problem is being built within this context, so that `stop` raises `SearchStopped` there.

        Raises:
            SearchStopped: the search was stopped before, or is stopped while the problem is built.
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
        """Call no `show` within this context, in which a part of a problem is searched.

        A lower bound of the part is not a lower bound of the whole problem.
        """
        show, self.show = self.show, None
        try:
            yield
        finally:
            self.show = show

    def note(self, best: float, lower_bound: float) -> None:
        """Call `show`, if given, with the best cost and the proven lower bound of the problem, both in seconds."""
        if self.show is not None:
            self.show(SearchProgress(self.problem, best, max(0.0, lower_bound)))
