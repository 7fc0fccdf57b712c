"""What a pipeline's step is made of: what each stage takes, which schedule runs them, and what overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields

from cost_models.errors import CostArgumentError
from cost_models.schedule_orders import SCHEDULES, ActionKind


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What one stage takes for one micro-batch (seconds), and once per step.

    Args:
        forward_s: forward, communication inside the stage that nothing hides included.
        backward_input_s: backward to the stage's input; `backward_weight_s`: to its weights. A schedule that does not
            cut the backward runs both, one after the other.
        send_s: sending the output to the next stage's rank, and its gradient back (nothing where both sit on one rank).
        recompute_s: forward work that the backward repeats, ahead of `backward_input_s`.
        forward_communication_s, backward_communication_s: the part of forward_s, and of the whole backward, in which
            the stage only communicates: what the pairs of DualPipeV can hide.
        gather_s: gathering the stage's parameters, once, before its first forward.
        reduce_s: reducing its gradients, once, after its last backward.
        update_s: its optimizer, once.
        activation_bytes: what its forward saves for its backward.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    send_s: float = 0.0
    recompute_s: float = 0.0
    forward_communication_s: float = 0.0
    backward_communication_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0
    activation_bytes: float = 0.0

    @property
    def backward_s(self) -> float:
        """The whole backward, recomputation included."""
        return self.recompute_s + self.backward_input_s + self.backward_weight_s

    def action_s(self, kind: ActionKind) -> float:
        """Seconds of one action."""
        match kind:
            case ActionKind.FORWARD:
                return self.forward_s
            case ActionKind.BACKWARD:
                return self.backward_s
            case ActionKind.BACKWARD_INPUT:
                return self.recompute_s + self.backward_input_s
            case ActionKind.BACKWARD_WEIGHT:
                return self.backward_weight_s


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipelined step.

    Args:
        schedule: a name of `schedule_orders.SCHEDULES`.
        stages: in the order of the model; their number is a multiple of `virtual_stages`.
        micro_batches: micro-batches of a step (per data parallel replica).
        virtual_stages: stages on each rank.
        overlap_sends: whether transfers overlap with compute; None as torch's class does (all that do not swap).
        overlap_pairs: whether each half of DualPipeV's pairs computes while the other communicates; torch runs them
            one after the other unless it is given a function that overlaps them.
        buckets: pieces into which gathers and reductions are cut; 1 overlaps neither with its own stage's compute.
        clips_norm: whether the update waits for the gradients of all ranks.

    Raises:
        CostArgumentError: the stages do not lie evenly on ranks, there is no bucket, a time is negative, or a stage
            communicates for longer than it runs.
    """

    schedule: str
    stages: Sequence[StageTimes]
    micro_batches: int
    virtual_stages: int = 1
    _: KW_ONLY
    overlap_sends: bool | None = None
    overlap_pairs: bool = False
    buckets: int = 1
    clips_norm: bool = False

    def __post_init__(self) -> None:
        if not self.stages or self.virtual_stages < 1 or len(self.stages) % self.virtual_stages:
            raise CostArgumentError(
                f"{len(self.stages)} stages do not lie evenly on ranks with virtual_stages={self.virtual_stages} each."
            )
        if self.buckets < 1:
            raise CostArgumentError(
                f"buckets={self.buckets!r}: gathers and reductions are cut into at least one piece."
            )
        for number, stage in enumerate(self.stages):
            _check(number, stage)

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.stages) // self.virtual_stages

    @property
    def sends_overlap(self) -> bool:
        """`overlap_sends`, decided."""
        return not SCHEDULES[self.schedule].swaps if self.overlap_sends is None else self.overlap_sends

    @property
    def swaps(self) -> bool:
        """Whether neighbours exchange what they have made, both waiting for it; see `schedules`."""
        return SCHEDULES[self.schedule].swaps and not self.sends_overlap


_NAMES = tuple(part.name for part in fields(StageTimes))


def _check(number: int, stage: StageTimes) -> None:
    for name in _NAMES:
        if not getattr(stage, name) >= 0:
            raise CostArgumentError(f"Stage {number} has {name}={getattr(stage, name)!r}; at least 0.")
    if stage.forward_communication_s > stage.forward_s or stage.backward_communication_s > stage.backward_s:
        raise CostArgumentError(f"Stage {number} communicates for longer than it runs: {stage!r}.")
