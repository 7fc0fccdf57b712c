"""Result of a proof that padding of a call's inputs reaches no result of the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SizeDifferences = Mapping[int, int]
"""By dim of a result: the dim's size minus the length of the inputs, both without padding.

Only dims that padded inputs make longer have an entry. The difference is usually 0; for predictions that are shifted by
one place it is -1.
"""


@dataclass(frozen=True, slots=True)
class PaddingProof:
    """Result of an attempt to prove that padding of a call's inputs changes no result of the call.

    Args:
        cuts: by index of a result, its dims that are cut after a call, because padded inputs make them longer; see
            `SizeDifferences`.
        as_compiled: whether the program must be traced as compiled code (`Request.as_compiled`).
        reason: why padding might change a result; "" if the proof succeeded.
    """

    cuts: Mapping[int, SizeDifferences] = field(default_factory=dict)
    as_compiled: bool = False
    reason: str = ""
