"""What stands between a running search and its user: it says how the search goes, and whether it is to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
    """

    show: Callable[[Progress], None] | None = None
    is_stopped: bool = False
    problem: str = ALL_PLANS
    is_building: bool = False

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
