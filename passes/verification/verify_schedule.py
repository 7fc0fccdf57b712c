"""Verifies that the ranks of a pipeline compute every micro-batch once, and never wait for each other in a circle.

A step without stages is a pipeline of one stage. The loss of a batch is the weighted sum of the losses of its
micro-batches (`passes.verification.weigh_loss`). So the gradient of the batch is the sum of the gradients of all
micro-batches, each once. `passes.verification.verify_program` shows that the update reads this sum.

The proof reads the tasks of each rank, whatever the name of the schedule. A slot is a tuple of tasks that a rank runs
at once. The proof shows three things:

1. Each stage runs, on its rank, every micro-batch's forward once, in the order of the batch. (Each forward draws the
   next seed, and reads the buffers that the previous forward wrote.) It runs every backward once, whole or split.
2. Each message between stages on two ranks is sent once and received once, and there are no other messages.
3. All ranks reach the ends of their orders, and each task runs after its operands.

The third point is shown by a simulation without numbers or times. A rank issues a transfer and goes on. It waits for a
message only at the first task that reads the message. The transfers of a rank run one slot after the other, as on one
stream. A slot of transfers ends when the other ranks have reached the other ends of its transfers. Messages between two
ranks arrive in the order of sending, and both ends must name the same message by the same tag. The result does not
depend on the order in which ranks advance, so one simulation suffices.

A real transport may allow more (a stream for each pair of ranks, buffered sends). An order that runs in the simulation
runs there too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from autoshard.errors import VerificationError
from autoshard.ir.pipeline_order import Message, PipelineOrder, Slot, StageTask, Work


def verify_schedule(order: PipelineOrder, *, trains: bool = True) -> None:
    """Prove that a pipeline's step does all of its work once, and ends.

    Args:
        order: the tasks of each rank.
        trains: whether backwards are part of the work.

    Raises:
        VerificationError: a task is missing, repeated or at a wrong place, or ranks wait in a circle. The message names
            the rank and the task.

    Example:
        >>> from dataclasses import replace
        >>> from passes.lowering.order_pipeline import order_pipeline
        >>> order = order_pipeline("1F1B", ranks=2, micro_batches=4)
        >>> verify_schedule(order)
        >>> sender, receiver = order.ranks
        >>> verify_schedule(replace(order, ranks=(sender, receiver[1:])))
        Traceback (most recent call last):
        ...
        autoshard.errors.VerificationError: stage 0's output of micro-batch 0 is sent once and received 0 times ...
    """
    for rank, slots in enumerate(order.ranks):
        for slot in slots:
            _check_places(order, rank, slot)
    for stage in range(len(order.stage_ranks)):
        _check_work(order, stage, trains=trains)
    _check_transfers(order, trains=trains)
    _ScheduleRun(order).to_the_end()


def _check_places(order: PipelineOrder, rank: int, slot: Slot) -> None:
    """Raise `VerificationError` if a slot is empty or mixed, or a task of the slot is on a wrong rank.

    A mixed slot has both computation and transfers. Each task must belong to a stage of `rank`, and each transfer must
    lead to another rank.
    """
    if len({task.work.is_transfer for task in slot}) != 1:
        raise VerificationError(f"rank {rank}: slot {_text(slot)} is empty, or computes and transfers at once.")
    for task in slot:
        if not 0 <= task.stage < len(order.stage_ranks) or order.stage_ranks[task.stage] != rank:
            raise VerificationError(f"rank {rank} runs {task}; stages lie on ranks {order.stage_ranks}.")
        if task.work.is_transfer and not (_is_of_a_stage(order, task) and order.crosses_ranks(task.message)):
            raise VerificationError(f"rank {rank} runs {task}, which leads to no other rank.")


def _is_of_a_stage(order: PipelineOrder, task: StageTask) -> bool:
    return 0 <= task.message.stage < len(order.stage_ranks)


def _check_work(order: PipelineOrder, stage: int, *, trains: bool) -> None:
    """Raise `VerificationError` unless a stage runs the forward and the backward of each micro-batch once.

    Forwards must run in the order of the batch. Without `trains` no backward may run.
    """
    slots = order.ranks[order.stage_ranks[stage]]
    tasks = [task for slot in slots for task in slot if task.stage == stage]
    expected = list(range(order.micro_batches))
    forwards = [task.micro_batch for task in tasks if task.work is Work.FORWARD]
    if forwards != expected:
        raise VerificationError(f"stage {stage} runs the forward of micro-batches {forwards}, not {expected} in order.")
    whole, inputs, weights = (
        Counter(task.micro_batch for task in tasks if task.work is work)
        for work in (Work.BACKWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
    )
    due = expected if trains else []
    if whole + inputs != Counter(due) or inputs != weights:
        raise VerificationError(
            f"stage {stage} runs backward {sorted(whole.elements())} whole, {sorted(inputs.elements())} for its input "
            f"and {sorted(weights.elements())} for its weights; each of micro-batches {due} is due once."
        )


def _check_transfers(order: PipelineOrder, *, trains: bool) -> None:
    tasks = [task for slots in order.ranks for slot in slots for task in slot if task.work.is_transfer]
    sent = Counter(task.message for task in tasks if task.work.is_send)
    received = Counter(task.message for task in tasks if not task.work.is_send)
    for message in dict.fromkeys((*_messages(order, trains=trains), *sent, *received)):
        if (sent[message], received[message]) != (1, 1):
            raise VerificationError(
                f"{message} is sent {_times(sent[message])} and received {_times(received[message])} between rank "
                f"{order.stage_ranks[message.stage]} and rank {order.stage_ranks[message.reader]}."
            )


def _messages(order: PipelineOrder, *, trains: bool) -> Iterator[Message]:
    """Yield all messages that a step sends between neighbouring stages on different ranks."""
    for stage in range(len(order.stage_ranks)):
        for is_forward in (True, False) if trains else (True,):
            for number in range(order.micro_batches):
                if order.crosses_ranks(message := Message(stage, is_forward, number)):
                    yield message


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


@dataclass(slots=True)
class _ScheduleRun:
    """The simulation of a step.

    Args:
        places: for each rank, the index of its next slot.
        issued: for each rank, the transfers under way, as a queue of slots.
        messages: for each rank, the messages that the rank has made or received.
        done: the finished tasks, as (work, stage, micro-batch).
    """

    order: PipelineOrder
    places: list[int] = field(init=False)
    issued: list[deque[list[StageTask]]] = field(init=False)
    messages: list[set[Message]] = field(init=False)
    done: set[tuple[Work, int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.places = [0 for _ in self.order.ranks]
        self.issued = [deque() for _ in self.order.ranks]
        self.messages = [set() for _ in self.order.ranks]

    def to_the_end(self) -> None:
        """Run all ranks, and transfer messages whose two ends are ready, until nothing moves.

        Raises:
            VerificationError: a rank has not finished its tasks then.
        """
        ranks = range(len(self.order.ranks))
        pairs = [(rank, other) for rank in ranks for other in ranks if rank != other]
        while sum(map(self._run_next, ranks)) + sum(self._transfer(*pair) for pair in pairs):
            pass
        waiting = [text for rank in ranks if (text := self._waiting(rank))]
        if waiting:
            raise VerificationError(f"the pipeline never ends: {'; '.join(waiting)}.")

    def _run_next(self, rank: int) -> bool:
        """Run a rank's next slot of tasks, or issue its next slot of transfers, and return True.

        If the operands of a task are missing, nothing runs, and False is returned.
        """
        slots, place = self.order.ranks[rank], self.places[rank]
        if place == len(slots) or not all(self._can_run(rank, task) for task in slots[place]):
            return False
        self.places[rank] += 1
        if slots[place][0].work.is_transfer:
            self.issued[rank].append(list(slots[place]))
            return True
        for task in slots[place]:
            self.done.add((task.work, task.stage, task.micro_batch))
            if task.work is not Work.BACKWARD_WEIGHT:
                self.messages[rank].add(task.message)
        return True

    def _can_run(self, rank: int, task: StageTask) -> bool:
        """Whether the operands of a task are on the rank.

        Raises:
            VerificationError: the task sends a message that the rank has not made yet.
        """
        stage, number = task.stage, task.micro_batch
        match task.work:
            case Work.FORWARD:
                return stage == 0 or Message(stage - 1, True, number) in self.messages[rank]
            case Work.BACKWARD | Work.BACKWARD_INPUT:
                is_last = stage == len(self.order.stage_ranks) - 1
                is_there = is_last or Message(stage + 1, False, number) in self.messages[rank]
                return is_there and (Work.FORWARD, stage, number) in self.done
            case Work.BACKWARD_WEIGHT:
                return (Work.BACKWARD_INPUT, stage, number) in self.done
        if task.work.is_send and task.message not in self.messages[rank]:
            raise VerificationError(f"rank {rank} runs {task} before it has computed {task.message}.")
        return True

    def _transfer(self, rank: int, other: int) -> bool:
        """Move the next message from `rank` to `other`, and return True.

        If one of the two ranks has not issued the transfer, nothing moves, and False is returned.

        Raises:
            VerificationError: the ranks name different messages or tags.
        """
        send, receive = self._next(rank, other, is_send=True), self._next(other, rank, is_send=False)
        if send is None or receive is None:
            return False
        if (send.message, send.tag) != (receive.message, receive.tag):
            raise VerificationError(
                f"rank {rank} sends {send} (tag {send.tag}) where rank {other} receives {receive} (tag {receive.tag})."
            )
        self.messages[other].add(send.message)
        for owner, task in ((rank, send), (other, receive)):
            self.issued[owner][0].remove(task)
            if not self.issued[owner][0]:
                self.issued[owner].popleft()
        return True

    def _next(self, rank: int, other: int, *, is_send: bool) -> StageTask | None:
        """Return the next transfer between `rank` and `other` in the oldest slot of transfers that `rank` has issued.

        With `is_send`, it is a send to `other`, otherwise a receive from `other`. None is returned if the slot has
        none.
        """
        slot = self.issued[rank][0] if self.issued[rank] else ()
        fitting = (task for task in slot if task.work.is_send is is_send and self._other_end(task) == other)
        return next(fitting, None)

    def _other_end(self, task: StageTask) -> int:
        message = task.message
        return self.order.stage_ranks[message.reader if task.work.is_send else message.stage]

    def _waiting(self, rank: int) -> str:
        """Return a text that names the slots for which a rank waits, or "" if the rank has finished all slots."""
        parts = []
        if self.places[rank] < len(self.order.ranks[rank]):
            parts.append(f"rank {rank} waits before {_text(self.order.ranks[rank][self.places[rank]])}")
        if self.issued[rank]:
            others = sorted({self._other_end(task) for task in self.issued[rank][0]})
            parts.append(f"its {_text(tuple(self.issued[rank][0]))} waits for rank {', '.join(map(str, others))}")
        return " and ".join(parts) if parts else ""


def _text(slot: Slot) -> str:
    return "+".join(map(str, slot))
