"""The stages and micro-batches that a pipeline rank has in memory at once.

A stage is planned as if its rank had several equal stages. Parameters, optimizer state and sums of gradients count once
for each of them. Saved values count once for each micro-batch between its forward and its backward.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The load of one pipeline rank.

    Args:
        stages: number of stages on the rank, all taken to be equal to the planned stage.
        in_flight: number of micro-batches with saved values in memory, summed over these stages.
    """

    stages: int = 1
    in_flight: int = 1


ONE_STAGE = StageLoad()
"""The load of a program without pipeline stages."""
