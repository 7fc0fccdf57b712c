"""What stands between a running search and its user: it says how the search goes, and whether it is to end."""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass(slots=True)
class SearchControl:
    """Handed down to all searches for one plan.

    Args:
        show: told now and then how the search stands.
        is_stopped: searches end as soon as they have something to give; set from outside.
        problem: what is searched now.
    """

    show: Callable[[Progress], None] | None = None
    is_stopped: bool = False
    problem: str = ALL_PLANS

    def note(self, best: float, lower_bound: float) -> None:
        """Show how the search stands."""
        if self.show is not None:
            self.show(Progress(self.problem, best, max(0.0, lower_bound)))
