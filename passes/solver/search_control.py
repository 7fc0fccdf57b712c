"""What stands between a running search and its user: it says how the search goes, and whether it is to end.

Searches end by counted work (rounds, nodes of a tree, attempts), so that a question has one answer on every machine.
The time that a user gives is a ceiling over all searches of a plan; where it ends one that would have gone on, that is
noted, as the plan may be another one on another day.
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
    """How a search stands.

    Args:
        problem: what is searched: a known recipe, or the whole.
        best: the cheapest choice so far that fits, seconds; infinite where there is none yet.
        lower_bound: proven: no choice of the problem is cheaper, seconds.
    """

    problem: str
    best: float
    lower_bound: float


@dataclass(slots=True)
class Ceiling:
    """The most time that the searches for a plan may take together.

    Args:
        until: a time of `time.monotonic`.
        has_cut: it ended a search that would have gone on.
    """

    until: float = math.inf
    has_cut: bool = False

    @classmethod
    def within(cls, seconds: float) -> Self:
        """That of searches which begin now."""
        return cls(time.monotonic() + seconds)

    def cuts(self) -> bool:
        """Whether it is reached; asked where a search would go on, and nowhere else, as it notes that it cut one."""
        if not self.has_cut and time.monotonic() >= self.until:
            self.has_cut = True
            _LOGGER.warning(
                "time_budget_s was up before the search for a plan had ended: with more time, or on a machine that is "
                "faster or less busy, the plan may be another"
            )
        return self.has_cut


_STOPPED = "the search was stopped before its problem was built"


class SearchStopped(KeyboardInterrupt):
    """A search was stopped while it had nothing to give, as its problem was not built yet."""


@dataclass(slots=True)
class SearchControl:
    """Handed down to all searches for one plan.

    Args:
        show: told now and then how the search stands.
        is_stopped: searches end as soon as they have something to give; set from outside.
        problem: what is searched now.
        is_building: a problem is being built; see `building`.
        ceiling: of this search, and of others for the same plan.
    """

    show: Callable[[Progress], None] | None = None
    is_stopped: bool = False
    problem: str = ALL_PLANS
    is_building: bool = False
    ceiling: Ceiling = field(default_factory=Ceiling)

    @classmethod
    def within(cls, seconds: float) -> Self:
        """That of a search which begins now, and may take so long."""
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
        """Within, nothing is shown: what bounds a part of a problem does not bound the whole."""
        show, self.show = self.show, None
        try:
            yield
        finally:
            self.show = show

    def note(self, best: float, lower_bound: float) -> None:
        """Show how the search stands."""
        if self.show is not None:
            self.show(Progress(self.problem, best, max(0.0, lower_bound)))
