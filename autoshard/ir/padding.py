"""Result of a proof that padding of a call's inputs reaches no result of the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SizeDifferences = Mapping[int, int]
"""From each dim of a result that grows with the padded inputs, to its unpadded size minus the inputs' unpadded length.

The difference is usually 0; for predictions that are shifted by one place it is -1.
"""


@dataclass(frozen=True, slots=True)
class PaddingProof:
    """Result of an attempt to prove that padding of a call's inputs changes no result of the call.

    Args:
        cuts: index of each result that is longer with padded inputs, to its dims that are cut after a call. Each dim
            maps to its unpadded size minus the unpadded length of the inputs, usually 0.
        as_compiled: whether the program must be traced as compiled code (`Request.as_compiled`).
        reason: why padding might change a result; "" if the proof succeeded.
    """

    cuts: Mapping[int, SizeDifferences] = field(default_factory=dict)
    as_compiled: bool = False
    reason: str = ""
