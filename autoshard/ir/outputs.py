"""Choice of the model's outputs that a call returns, and of their layout."""

from __future__ import annotations

from enum import StrEnum


class Outputs(StrEnum):
    """Choice of the outputs that a call returns: all as the plan shards them, all gathered, or the loss alone."""

    AS_PLANNED = "all outputs, as the plan has them"
    WHOLE = "all outputs, whole"
    LOSS = "the loss alone"
