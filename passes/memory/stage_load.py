"""The stages and micro-batches that a pipeline rank holds beside the stage and micro-batch of a program.

A stage is planned as if its rank had several stages like it. Each of them has parameters, optimizer state and sums of
gradients. Each micro-batch between its forward and its backward has saved values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The load of a rank.

    Args:
        stages: number of stages on the rank, all like the planned stage.
        in_flight: number of micro-batches whose saved values are held, over all these stages.
    """

    stages: int = 1
    in_flight: int = 1


ONE_STAGE = StageLoad()
"""One stage, and one micro-batch at a time: the load of programs without stages."""
