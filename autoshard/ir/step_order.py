"""The order in which a training step runs its micro-batches, as data: what is run is what is proven."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Action(StrEnum):
    """What a task of a step does; a backward's gradients are added to those of the micro-batches before it."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Task:
    """One part of a step: an action, and the micro-batch whose it is; the update is of all."""

    action: Action
    micro_batch: int | None = None


@dataclass(frozen=True, slots=True)
class StepOrder:
    """What a step does, one after the other.

    Args:
        tasks: its parts.
        divisor: how many parts a mean over the batch is taken of; see `autoshard.ir.loss_weights`.
    """

    tasks: tuple[Task, ...]
    divisor: int


def one_after_another(micro_batches: int) -> StepOrder:
    """Each micro-batch forward and backward before the next, so that one's activations are held at a time."""
    both = (Action.FORWARD, Action.BACKWARD)
    tasks = (Task(action, number) for number in range(micro_batches) for action in both)
    return StepOrder((*tasks, Task(Action.UPDATE)), micro_batches)
