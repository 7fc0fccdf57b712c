"""Whether padding of a call is proven to reach no result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Grown = Mapping[int, int]
"""Dims of a result that grow with the inputs, with how much longer than these they are (-1 of shifted predictions)."""


@dataclass(frozen=True, slots=True)
class PaddingProof:
    """Whether padding is shown to reach no result of a call.

    Args:
        cuts: what grows with the inputs, by the number of the result.
        as_compiled: whether the program must be traced as compiled code (`Request.as_compiled`).
        reason: how padding may reach a result; empty where it is shown that it does not.
    """

    cuts: Mapping[int, Grown] = field(default_factory=dict)
    as_compiled: bool = False
    reason: str = ""
