"""The parts of a pipeline's step that do not depend on the order of its actions: pairs, reductions, updates.

1. A forward and a backward that run as one slot overlap computation with communication (DualPipeV).
2. The gradients of a stage are reduced over data parallel ranks after its last backward, on a stream of their own. Cut
   into b buckets, all but the last bucket may run under that backward.
3. The update follows, on all ranks at once where the norm of the gradients is clipped.

The rest of the step's time on a rank is computation, an exposed transfer or gather, or bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cost_models.stages import Pipeline, StageTimes


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Where the step goes on one pipeline rank, seconds; the parts sum to the step.

    Args:
        compute_s: forwards and backwards.
        update_s: the optimizer.
        exposed_send_s: waiting for transfers under way; `exposed_gather_s`, `exposed_reduce_s`: for parameters and
            gradients likewise.
        bubble_s: the rest: waiting for other ranks.
    """

    compute_s: float
    update_s: float
    exposed_send_s: float
    exposed_gather_s: float
    exposed_reduce_s: float
    bubble_s: float


def reduction(duration: float, free: float, start: float, end: float, buckets: int) -> tuple[float, float]:
    """When gradients are reduced that a backward makes from `start` to `end`, on a stream that is free at `free`."""
    begin = max(free, start + (end - start) / buckets)
    return begin, max(begin + duration, end + duration / buckets)


class StepEnd(NamedTuple):
    """The end of a step, where it went on each rank, and when the ranks' updates began."""

    total_s: float
    ranks: tuple[RankTimes, ...]
    update_starts_s: tuple[float, ...]


def finish_step(
    pipeline: Pipeline,
    owners: Sequence[int],
    free: Sequence[float],
    reduced: Sequence[float],
    known: Sequence[tuple[float, float, float]],
) -> StepEnd:
    """Run the updates.

    Args:
        pipeline: the step.
        owners: by stage, its rank.
        free, reduced: by rank, when its last slot and its last reduction ended.
        known: by rank, seconds of computing, of waiting for transfers, of waiting for gathers.
    """
    updates = [0.0 for _ in free]
    for stage, rank in zip(pipeline.stages, owners, strict=True):
        updates[rank] += stage.update_s
    ready = [max(times) for times in zip(free, reduced, strict=True)]
    starts = [max(ready)] * len(ready) if pipeline.clips_norm else ready
    total = max(start + update for start, update in zip(starts, updates, strict=True))
    parts = []
    for rank, (computed, sends, gathers) in enumerate(known):
        spent = (computed, updates[rank], sends, gathers, ready[rank] - free[rank])
        parts.append(RankTimes(*spent, bubble_s=max(0.0, total - sum(spent))))
    return StepEnd(total, tuple(parts), tuple(starts))


def pair_s(forward: StageTimes, backward: StageTimes) -> float:
    """Seconds of a forward and a backward that run as one, each computing while the other communicates."""
    times = (forward.forward_s, backward.backward_s)
    sent = (forward.forward_communication_s, backward.backward_communication_s)
    return max(*times, sum(sent), sum(times) - sum(sent))
