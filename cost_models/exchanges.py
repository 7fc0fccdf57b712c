"""Exchanges between ranks inside calls, and the temporary memory of calls, by operator.

An operator such as ring attention is one call of a program, but communicates inside (`autoshard.kernels.exchange`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cost_models.collectives import all_to_all_time, shift_time
from cost_models.topology import GroupLinks
from cost_models.work import TensorInfo

Tensors = Sequence[TensorInfo]
Arguments = tuple[object, ...]


class Exchanged(NamedTuple):
    """One exchange inside a call.

    Args:
        size_bytes: bytes that the busiest rank has to distribute, including the share that stays on the rank.
        is_shift: whether all bytes go to the next rank of a ring; otherwise each rank gets a share (an all-to-all).
        overlapped_share: share of the call's own computation that overlaps with the exchange.
    """

    size_bytes: float
    is_shift: bool = False
    overlapped_share: float = 0.0

    def sent_bytes(self, ranks: int) -> float:
        """Return the bytes that leave the busiest rank in this exchange, in a group of `ranks` members."""
        return self.size_bytes if self.is_shift else (1 - 1 / ranks) * self.size_bytes

    def waited_s(self, group: GroupLinks, computed_s: float, slowdown: float | None) -> float:
        """Return the seconds by which the exchange prolongs a call that computes for `computed_s` seconds.

        Computation beside the exchange takes 1 + `slowdown` times as long. If `slowdown` is None, nothing overlaps.
        """
        sent_s = (shift_time if self.is_shift else all_to_all_time)(self.size_bytes, group)
        if slowdown is None:
            return sent_s
        return sent_s - (1 - slowdown) * min(sent_s, self.overlapped_share * computed_s)


EXCHANGES: dict[str, Callable[[Tensors, Arguments], list[Exchanged]]] = {}
"""Operator name to a function that returns a call's exchanges in order, given its local operands and its arguments."""

WORKSPACE_BYTES: dict[str, Callable[[Tensors, Arguments], float]] = {}
"""Operator name to a function that returns the most bytes in use during a call, beside operands and results.

The function takes the call's local operands and its arguments.
"""
