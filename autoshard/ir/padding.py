"""Whether padding of a call is proven to reach no result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Grown = Mapping[int, int]
"""Dims of a result that grow with the inputs, and their length beyond the inputs' (-1 for shifted predictions)."""


@dataclass(frozen=True, slots=True)
class PaddingProof:
    """Whether padding provably reaches no result of a call.

    Args:
        cuts: the growing dims, by the number of the result.
        as_compiled: whether the program must be traced as compiled code (`Request.as_compiled`).
        reason: why padding may reach a result; empty if it provably does not.
    """

    cuts: Mapping[int, Grown] = field(default_factory=dict)
    as_compiled: bool = False
    reason: str = ""
