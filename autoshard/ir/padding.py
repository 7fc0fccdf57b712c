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
    """Proof, or refusal, of the claim that padding of a call's inputs reaches no result.

    Args:
        cuts: for each result that grows with the padded inputs, by its index: the dims to cut back after a call.
        as_compiled: whether the program must be traced as compiled code (`Request.as_compiled`).
        reason: why padding may reach a result; "" if the claim is proven.
    """

    cuts: Mapping[int, SizeDifferences] = field(default_factory=dict)
    as_compiled: bool = False
    reason: str = ""
