"""`AnyRank`: whether something holds on any rank, asked at every step, such as a signal that one rank got."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.runtime.agreement.control_channel import ControlChannel
from autoshard.runtime.agreement.vector_exchange import LENGTH, connect


class AnyRank:
    """A yes-or-no question to all ranks, asked again at each call. All ranks must make it, and call it, together.

    Args:
        channel: the ranks; None for one process.
    """

    def __init__(self, channel: ControlChannel | None) -> None:
        self._channel = channel
        self._vectors = None if channel is None else connect(channel)

    def __call__(self, mine: bool, action: Callable[[], str]) -> bool:
        """Return whether `mine` is true on any rank. All ranks get the same answer.

        Args:
            mine: this rank's answer.
            action: returns the ranks' next action in words, for the error message if a rank is lost.

        Raises:
            LostRankError: a rank does not answer within the time limit of the channel.
        """
        if self._channel is None:
            return mine
        if self._vectors is None:
            return any(map(any, self._channel.exchange(bytes([mine]), action())))
        self._vectors.post((int(mine),) * LENGTH, action)
        return any(row[0] for row in self._vectors.collect(action))
