"""The outputs of a model that a call returns."""

from __future__ import annotations

from enum import StrEnum


class Outputs(StrEnum):
    """The outputs that a call returns."""

    AS_PLANNED = "all outputs, as the plan has them"
    WHOLE = "all outputs, whole"
    LOSS = "the loss alone"
