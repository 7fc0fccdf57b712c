"""A pipeline's step as it is priced: what each stage takes, and which schedule runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields

from cost_models.errors import CostArgumentError
from cost_models.schedule_orders import SCHEDULES


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage for one micro-batch.

    Args:
        forward_s: forward, communication inside the stage that nothing hides included.
        backward_input_s: backward to the stage's input; `backward_weight_s`: to its weights. A schedule that does not
            cut the backward runs both, one after the other.
        send_s: sending the output to the next stage's rank, and its gradient back (nothing where both sit on one rank).
        recompute_s: forward work that the backward repeats, ahead of `backward_input_s`.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    send_s: float = 0.0
    recompute_s: float = 0.0

    @property
    def backward_s(self) -> float:
        """The whole backward, recomputation included."""
        return self.recompute_s + self.backward_input_s + self.backward_weight_s

    @property
    def actions_s(self) -> tuple[float, float, float, float]:
        """Seconds of each kind of action, in the order of `ActionKind`."""
        return self.forward_s, self.backward_s, self.recompute_s + self.backward_input_s, self.backward_weight_s


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipelined step.

    Args:
        schedule: a key of `schedule_orders.SCHEDULES`.
        stages: in the order of the model; their number is a multiple of `virtual_stages`.
        micro_batches: micro-batches of a step (per data parallel replica).
        virtual_stages: stages on each rank.
        overlap_sends: whether transfers overlap with compute; None as torch's class does (all that do not swap).

    Raises:
        CostArgumentError: the stages do not lie evenly on ranks, or a time is negative.
    """

    schedule: str
    stages: Sequence[StageTimes]
    micro_batches: int
    virtual_stages: int = 1
    _: KW_ONLY
    overlap_sends: bool | None = None

    def __post_init__(self) -> None:
        if not self.stages or self.virtual_stages < 1 or len(self.stages) % self.virtual_stages:
            raise CostArgumentError(
                f"{len(self.stages)} stages do not lie evenly on ranks with virtual_stages={self.virtual_stages} each."
            )
        for number, stage in enumerate(self.stages):
            for name in _NAMES:
                if not getattr(stage, name) >= 0:
                    raise CostArgumentError(f"Stage {number} has {name}={getattr(stage, name)!r}; at least 0.")

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.stages) // self.virtual_stages

    @property
    def sends_overlap(self) -> bool:
        """`overlap_sends`, decided."""
        return not SCHEDULES[self.schedule].swaps if self.overlap_sends is None else self.overlap_sends


_NAMES = tuple(part.name for part in fields(StageTimes))
