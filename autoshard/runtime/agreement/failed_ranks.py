"""`FailedRanks`: ranks tell each other, in the middle of a step, whether a check failed on any of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from autoshard.runtime.agreement.control_group import ControlGroup
from autoshard.runtime.agreement.vector_exchange import LENGTH

T = TypeVar("T")

_ACTION = "compare the checks of the step"


class FailedRanks:
    """Finds out whether a check failed on any rank. All ranks must call its methods together.

    Args:
        control: the ranks of the whole run, in all pipeline stages; None if this process runs alone.
    """

    def __init__(self, control: ControlGroup | None) -> None:
        self._control = control if control is not None and len(control.channel.ranks) > 1 else None
        self._seen: Hashable = None

    def __deepcopy__(self, memo: dict[int, Any]) -> FailedRanks:
        """Return an object of the same ranks, for a copy of a step."""
        return FailedRanks(self._control)

    def any(self, has_failed: bool, program: Hashable) -> bool:
        """Return whether the check failed on any rank.

        The first call for a program waits for ranks that still load the program.

        Args:
            has_failed: whether the check failed on this rank.
            program: a value that is equal for calls that run one program.
        """
        if self._control is None:
            return has_failed
        is_new, self._seen = program != self._seen, program
        vectors = None if is_new else self._control.vectors
        if vectors is None:
            return any(self._control.gather(has_failed, _ACTION))
        vectors.post([int(has_failed)] + [0] * (LENGTH - 1), _action)
        return any(first for first, *_ in vectors.collect(_action))

    def gather(self, describe: Callable[[], T]) -> dict[int, T]:
        """Return the result of `describe` on each rank, by rank; the rank is 0 if this process runs alone."""
        if self._control is None:
            return {0: describe()}
        return dict(zip(self._control.channel.ranks, self._control.gather(describe(), _ACTION), strict=True))


def _action() -> str:
    return _ACTION
