"""The tasks of each pipeline rank in a step, transfers included, as data. The runtime executes the proven order.

A step without stages is a pipeline of one stage on one rank. The update follows the last task.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from autoshard.errors import PlanMismatchError
from autoshard.ir.read_json import read


class Work(StrEnum):
    """Kind of a task, in the letters of `torch.distributed.pipelining`.

    A backward is whole or split: `BACKWARD_INPUT` computes the gradient that the previous stage waits for, and
    `BACKWARD_WEIGHT` computes the gradients of the weights.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"

    @property
    def is_send(self) -> bool:
        """Whether the task sends a message to another rank."""
        return self in (Work.SEND_FORWARD, Work.SEND_BACKWARD)

    @property
    def is_transfer(self) -> bool:
        """Whether the task sends or receives a message."""
        return self.is_send or self in (Work.RECEIVE_FORWARD, Work.RECEIVE_BACKWARD)


class Message(NamedTuple):
    """A value that `stage` computes for the next or the previous stage.

    With `is_forward` the value is an output for the next stage, otherwise a gradient for the previous stage.
    """

    stage: int
    is_forward: bool
    micro_batch: int

    @property
    def reader(self) -> int:
        """Index of the stage that receives the message; beyond an end of the pipeline, -1 or the number of stages."""
        return self.stage + (1 if self.is_forward else -1)

    def __str__(self) -> str:
        kind = "output" if self.is_forward else "input's gradient"
        return f"stage {self.stage}'s {kind} of micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True)
class StageTask:
    """One task of a rank. `1SEND_F0` is stage 1's send of its output of micro-batch 0.

    `stage` is the working stage; for a receive, the reading stage. `tag` is equal at both ends of a transfer.
    """

    work: Work
    stage: int
    micro_batch: int
    tag: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.micro_batch}"

    @property
    def message(self) -> Message:
        """The message that a transfer moves, or that a forward or backward produces."""
        is_forward = self.work in (Work.FORWARD, Work.SEND_FORWARD, Work.RECEIVE_FORWARD)
        maker = self.stage
        if self.work.is_transfer and not self.work.is_send:
            maker += -1 if is_forward else 1
        return Message(maker, is_forward, self.micro_batch)


Slot = tuple[StageTask, ...]
"""Tasks that a rank starts at once: one task, a fused forward and backward, or transfers issued together."""


@dataclass(frozen=True, slots=True)
class PipelineOrder:
    """The order of the tasks of a training step, or of a call without gradients, on each pipeline rank.

    Args:
        stage_ranks: pipeline rank of each stage.
        micro_batches: number of equal parts of the batch, weighed by `autoshard.ir.loss_weights`.
        ranks: for each pipeline rank, its slots in running order. A slot has the tasks that the rank starts at once.
            Transfers are asynchronous: a rank waits for a message just before the first task that reads the message.
    """

    stage_ranks: tuple[int, ...]
    micro_batches: int
    ranks: tuple[tuple[Slot, ...], ...]

    @property
    def virtual_stages(self) -> int:
        """Number of stages on each pipeline rank."""
        return len(self.stage_ranks) // len(self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for people to read and edit, with one line of text for the tasks of each rank."""
        lines = [" ".join("+".join(map(str, slot)) for slot in slots) for slots in self.ranks]
        return {"stage_ranks": list(self.stage_ranks), "micro_batches": self.micro_batches, "ranks": lines}

    @classmethod
    def from_json(cls, data: Any) -> PipelineOrder:
        """Read the data of `to_json`. Raises `PlanMismatchError` that names the wrong part."""
        found = read(_OrderInFile, data, ("order",))
        ranks = tuple(tuple(map(_read_slot, line.split())) for line in found.ranks)
        if not ranks or set(found.stage_ranks) != set(range(len(ranks))):
            raise PlanMismatchError(
                f"'order' puts stages on ranks {list(found.stage_ranks)}, and has the tasks of {len(ranks)} ranks. "
                "Each rank has a line of tasks, and at least one stage."
            )
        return cls(found.stage_ranks, found.micro_batches, ranks)

    @classmethod
    def of_plan(cls, data: Any, stages: int) -> PipelineOrder | None:
        """Read the order of a plan with `stages` stages, from the data of `to_json`; None without stages.

        Raises `PlanMismatchError` if the data is wrong, or has another number of stages.
        """
        found = None if data is None else cls.from_json(data)
        ordered = 0 if found is None else len(found.stage_ranks)
        if ordered != stages:
            raise PlanMismatchError(f"'order' has {ordered} stages in the plan, and 'stages' has {stages}.")
        return found

    @property
    def trains(self) -> bool:
        """Whether the order has a backward, whole or split."""
        return any(
            task.work is not Work.FORWARD and not task.work.is_transfer
            for slots in self.ranks
            for slot in slots
            for task in slot
        )

    @property
    def cuts_backwards(self) -> bool:
        """Whether the order splits some backward into two tasks."""
        return any(task.work is Work.BACKWARD_INPUT for slots in self.ranks for slot in slots for task in slot)

    def places(self) -> Mapping[tuple[int, bool, int], int]:
        """Index of the slot in which each forward or backward runs on its rank, by (stage, is forward, micro-batch).

        A split backward counts by its first half, which sends and receives the messages.
        """
        return {
            (task.stage, task.work is Work.FORWARD, task.micro_batch): place
            for slots in self.ranks
            for place, slot in enumerate(slots)
            for task in slot
            if task.work in (Work.FORWARD, Work.BACKWARD, Work.BACKWARD_INPUT)
        }

    def crosses_ranks(self, message: Message) -> bool:
        """Whether a stage on another rank reads the message. False if no stage reads it."""
        is_there = 0 <= message.reader < len(self.stage_ranks)
        return is_there and self.stage_ranks[message.reader] != self.stage_ranks[message.stage]

    def __str__(self) -> str:
        lines = (" ".join("+".join(map(str, slot)) for slot in slots) for slots in self.ranks)
        return "\n".join(f"rank {rank}: {line}" for rank, line in enumerate(lines))


def one_after_another(micro_batches: int) -> PipelineOrder:
    """Return the order of a step without stages: the backward of each micro-batch follows its forward.

    Example:
        >>> print(one_after_another(2))
        rank 0: 0F0 0B0 0F1 0B1
    """
    both = (Work.FORWARD, Work.BACKWARD)
    slots = ((StageTask(work, 0, number),) for number in range(micro_batches) for work in both)
    return PipelineOrder((0,), micro_batches, (tuple(slots),))


@dataclass(frozen=True, slots=True)
class _OrderInFile:
    stage_ranks: tuple[int, ...]
    micro_batches: int
    ranks: tuple[str, ...]


_TASK = re.compile(r"(\d{1,9})([A-Z]+(?:_[FB])?)(\d{1,9})")


def _read_slot(text: str) -> Slot:
    return tuple(map(_read_task, text.split("+")))


def _read_task(text: str) -> StageTask:
    found = _TASK.fullmatch(text)
    if found is None or found[2] not in list(Work):
        raise PlanMismatchError(f"'order' has the unknown task {text!r}; write a task like 0F1 or 1SEND_B0.")
    work, micro_batch = Work(found[2]), int(found[3])
    return StageTask(work, int(found[1]), micro_batch, micro_batch if work.is_transfer else 0)
