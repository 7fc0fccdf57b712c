"""Exchanges between ranks inside calls, and their temporary memory, by operator.

Such an operator (`autoshard.kernels.exchange`) is one call of a program, with collectives inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cost_models.collectives import all_to_all_time, shift_time
from cost_models.streams import Overlap
from cost_models.topology import GroupLinks
from cost_models.work import TensorInfo

Tensors = Sequence[TensorInfo]
Arguments = tuple[object, ...]


class Exchanged(NamedTuple):
    """An exchange inside a call.

    Args:
        size_bytes: bytes of the busiest sender, including its own share.
        is_shift: whether all bytes go to the next rank; otherwise each rank gets a share.
        beside: share of the call's own computation that overlaps with the exchange.
    """

    size_bytes: float
    is_shift: bool = False
    beside: float = 0.0

    def sent_bytes(self, ranks: int) -> float:
        """Bytes that leave the rank."""
        return self.size_bytes if self.is_shift else (1 - 1 / ranks) * self.size_bytes

    def waited_s(self, group: GroupLinks, computed_s: float, overlap: Overlap | None) -> float:
        """Seconds that the exchange adds to a call with `computed_s` of computation."""
        sent_s = (shift_time if self.is_shift else all_to_all_time)(self.size_bytes, group)
        if overlap is None:
            return sent_s
        return sent_s - (1 - overlap.slowdown) * min(sent_s, self.beside * computed_s)


EXCHANGES: dict[str, Callable[[Tensors, Arguments], list[Exchanged]]] = {}
"""The exchanges of a call, in order, given its local operands and its arguments."""

WORKSPACE_BYTES: dict[str, Callable[[Tensors, Arguments], float]] = {}
"""The most bytes beside operands and results during a call, given its local operands and its arguments."""
