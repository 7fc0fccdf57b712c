"""A few numbers from each rank to all, at every step.

The all-gather of Bruck, Ho, Kipnis, Upfal and Weathersby (1997, section 3) in log2(ranks) rounds of Gloo messages
between pairs. The first round is under way while the rank works; with two ranks it is the only one. A message between
a pair takes a third of the time of Gloo's own all-gather, which changes threads for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from autoshard.errors import LostRankError
from autoshard.runtime.control_channel import ControlChannel

LENGTH = 9
"""How many numbers each rank gives."""

_GRACE_S = 5.0
"""How long ranks that lost another one wait for each other, to tell who it is."""


class VectorExchange:
    """Made by all ranks of a channel together, right after a turn of it.

    Args:
        channel: names a rank that is lost.
    """

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._ranks = channel.ranks
        self._place = self._ranks.index(channel.rank)
        timeout = timedelta(seconds=channel.timeout_s)
        self._group: Any = dist.new_group(
            list(self._ranks), timeout=timeout, backend="gloo", use_local_synchronization=True
        )
        self._rows = torch.zeros(len(self._ranks), LENGTH, dtype=torch.int64, device="cpu")
        self._works: list[Any] = []

    def post(self, numbers: Sequence[int], what: str) -> None:
        """Send this rank's numbers on their way."""
        self._rows[0] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        try:
            self._works = self._start_round(1)
        except RuntimeError as error:
            self._name_the_lost(what, error)

    def collect(self, what: str) -> torch.Tensor:
        """The numbers of all ranks, [ranks, LENGTH].

        Raises:
            LostRankError: on every rank that is left, if one does not send its own in time.
        """
        try:
            known = 1
            while known < len(self._ranks):
                for work in self._works:
                    work.wait()
                known = min(2 * known, len(self._ranks))
                self._works = self._start_round(known)
        except RuntimeError as error:
            self._name_the_lost(what, error)
        return self._rows.roll(self._place, 0)

    def _start_round(self, known: int) -> list[Any]:
        """Exchange the first rows, of which `known` are there, with the ranks at that distance."""
        size = len(self._ranks)
        count = min(known, size - known)
        if count <= 0:
            return []
        to, source = self._ranks[(self._place - known) % size], self._ranks[(self._place + known) % size]
        return [
            dist.isend(self._rows[:count].clone(), to, group=self._group),
            dist.irecv(self._rows[known : known + count], source, group=self._group),
        ]

    def _name_the_lost(self, what: str, error: RuntimeError) -> NoReturn:
        """Raise the same `LostRankError` on every rank."""
        timeout_s = min(self._channel.timeout_s, _GRACE_S)
        self._channel.exchange(b"", f"{what}, and lost another rank", timeout_s)
        raise LostRankError(
            f"Rank {self._channel.rank} lost its connection to another rank, though all are there, when it was to "
            f"{what}. Start the run again from its last checkpoint. ({error})"
        ) from error
