"""The stages and micro-batches that a pipeline rank has in memory at once.

A stage is planned as if its rank had several equal stages. Parameters, optimizer state and sums of gradients count once
for each of them. Saved values count once for each micro-batch between its forward and its backward.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The load of a rank.

    Args:
        stages: the count of the rank's stages, all equal to the planned one.
        in_flight: the count of micro-batches with saved values in memory, over all of these stages.
    """

    stages: int = 1
    in_flight: int = 1


ONE_STAGE = StageLoad()
"""One stage, and one micro-batch at a time: any program without stages."""
