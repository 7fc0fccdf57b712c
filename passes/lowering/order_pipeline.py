"""Inserts sends and receives into a pipeline's schedule.

Before → after, for two stages and one micro-batch:

    0F0 0B0       →       0F0 0SEND_F0 0RECV_B0 0B0        (on rank 0)
    1F0 1B0       →       1RECV_F0 1F0 1B0 1SEND_B0        (on rank 1)

A task is written as its stage, its work and its micro-batch. F is a forward, and B is a backward.

The pass simulates the schedule: ranks take turns and run one slot of tasks each. When a value is made, its send is
appended to the maker's order and its receive to the reader's order. So all transfers are in one global order, and every
rank has its transfers in this order. Ranks then cannot wait for each other in a circle. PyTorch's runtime for
multi-stage schedules does the same (`torch.distributed.pipelining.schedules`, since 2.5).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from autoshard.ir.pipeline_order import Message, PipelineOrder, Slot, StageTask, Work
from cost_models.schedule_orders import Slot as PricedSlot
from cost_models.schedule_orders import rank_orders, stage_ranks


def order_pipeline(schedule: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> PipelineOrder:
    """Return the order of each rank's tasks in a training step, with sends and receives.

    Args:
        schedule: a name of `cost_models.schedule_orders.SCHEDULES`.
        ranks: number of ranks of the pipeline.
        micro_batches: number of micro-batches in a step.
        virtual_stages: number of stages on each rank.

    Raises:
        CostArgumentError: the schedule is unknown, or does not allow these numbers.

    Example:
        >>> print(order_pipeline("1F1B", 2, 1))
        rank 0: 0F0 0SEND_F0 0RECV_B0 0B0
        rank 1: 1RECV_F0 1F0 1B0 1SEND_B0
    """
    orders = rank_orders(schedule, ranks, micro_batches, virtual_stages)
    shape = PipelineOrder(stage_ranks(schedule, ranks, virtual_stages), micro_batches, ())
    return _with_transfers(shape, [deque(map(_tasks, order)) for order in orders])


def order_forward(schedule: str, ranks: int, virtual_stages: int = 1) -> PipelineOrder:
    """Return the order of each rank's tasks in the forward of one batch, with sends and receives.

    The arguments are those of `order_pipeline`. The schedule decides the rank of each stage.

    Example:
        >>> print(order_forward("1F1B", 2))
        rank 0: 0F0 0SEND_F0
        rank 1: 1RECV_F0 1F0
    """
    places = stage_ranks(schedule, ranks, virtual_stages)
    left = [deque[Slot]() for _ in range(ranks)]
    for stage, rank in enumerate(places):
        left[rank].append((StageTask(Work.FORWARD, stage, 0),))
    return _with_transfers(PipelineOrder(places, 1, ()), left)


def _with_transfers(shape: PipelineOrder, left: list[deque[Slot]]) -> PipelineOrder:
    return _MessageInsertion(shape, left, slots=[[] for _ in left], there=[set() for _ in left]).run()


def _tasks(slot: PricedSlot) -> Slot:
    return tuple(StageTask(Work(action.kind.letter), action.stage, action.micro_batch) for action in slot)


@dataclass(frozen=True, slots=True)
class _MessageInsertion:
    """The state of the simulated schedule. A slot is the tuple of tasks that a rank runs at once.

    Args:
        shape: the ranks of the stages, without tasks.
        left: for each rank, the slots that it has not run yet.
        slots: for each rank, the slots that it has run so far, with sends and receives.
        there: for each rank, the messages that the rank has made or received so far.
    """

    shape: PipelineOrder
    left: list[deque[Slot]]
    slots: list[list[Slot]]
    there: list[set[Message]] = field(default_factory=list)

    def run(self) -> PipelineOrder:
        while any(self.left):
            turns = [self._put_next(rank) for rank, left in enumerate(self.left) if left]
            assert any(turns), "the orders of a schedule can run"
        ranks = tuple(tuple(slots) for slots in self.slots)
        return PipelineOrder(self.shape.stage_ranks, self.shape.micro_batches, ranks)

    def _put_next(self, rank: int) -> bool:
        """Run the next slot of a rank, with the transfers of its results, and return True.

        If the rank lacks a message that the slot reads, nothing runs, and False is returned.
        """
        slot = self.left[rank][0]
        if not all(needed is None or needed in self.there[rank] for needed in map(self._needed, slot)):
            return False
        self.slots[rank].append(self.left[rank].popleft())
        for task in slot:
            if task.work is not Work.BACKWARD_WEIGHT:
                self.there[rank].add(task.message)
                self._send(rank, task.message)
        return True

    def _needed(self, task: StageTask) -> Message | None:
        """Return the message that a task reads from a neighbouring stage, or None if it reads none."""
        if task.work is Work.FORWARD:
            return Message(task.stage - 1, True, task.micro_batch) if task.stage > 0 else None
        is_last = task.stage == len(self.shape.stage_ranks) - 1
        return (
            None if task.work is Work.BACKWARD_WEIGHT or is_last else Message(task.stage + 1, False, task.micro_batch)
        )

    def _send(self, rank: int, message: Message) -> None:
        """Append the send of a message to the order of `rank`, and its receive to the order of the reader's rank.

        Nothing is appended if the reader is on `rank` too.
        """
        if not self.shape.crosses_ranks(message):
            return
        there = self.shape.stage_ranks[message.reader]
        send, receive = (
            (Work.SEND_FORWARD, Work.RECEIVE_FORWARD)
            if message.is_forward
            else (Work.SEND_BACKWARD, Work.RECEIVE_BACKWARD)
        )
        number = message.micro_batch
        self.slots[rank].append((StageTask(send, message.stage, number, number),))
        self.slots[there].append((StageTask(receive, message.reader, number, number),))
        self.there[there].add(message)
