"""The load of a pipeline rank beside the stage and the micro-batch that a program is of.

A stage is planned as if its rank had some stages like it. Parameters, optimizer state and sums of gradients are there
for each of them; the values that a forward saves, for each micro-batch between its forward and its backward.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The load of a rank.

    Args:
        stages: on the rank, all like the one that is planned.
        in_flight: micro-batches whose saved values are held, over all of these stages.
    """

    stages: int = 1
    in_flight: int = 1


ONE_STAGE = StageLoad()
"""One stage, and one micro-batch at a time: any program without stages."""
