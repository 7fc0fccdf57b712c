"""What a call hands out of what its model returns."""

from __future__ import annotations

from enum import StrEnum


class Outputs(StrEnum):
    """What a call hands out."""

    AS_PLANNED = "all outputs, as the plan has them"
    WHOLE = "all outputs, whole"
    LOSS = "the loss alone"
