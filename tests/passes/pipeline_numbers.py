"""Run a pipeline's step in integers, and find wrong results and deadlocks.

Stage s maps x to (s + 2) x + c. The count c of the stage's forwards stands for a seed or a running mean. The loss of a
micro-batch is the last stage's output. A rank waits for its inputs; its transfers run one slot after the other. A rank
receives the sent value, whichever value the rank expects. Integers have equal sums in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from autoshard.ir.pipeline_order import PipelineOrder, StageTask, Work

Key = tuple[int, str, int]
"""Key of a value on a rank: the reading or writing stage, the kind, the micro-batch."""


@dataclass(slots=True)
class _Rank:
    """A rank's values, gradients, and issued transfers."""

    last: int
    held: dict[Key, int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    issued: deque[list[tuple[StageTask, int | None]]] = field(default_factory=deque)
    is_done: bool = False

    def run(self, order: PipelineOrder, rank: int) -> Iterator[bool]:
        """Run the tasks in order; yield True after each slot, and False while a task's inputs are missing."""
        for slot in order.ranks[rank]:
            if slot[0].work.is_transfer:
                self.issued.append([(task, self._sent(task)) for task in slot])
            else:
                while not all(self._input(task) in self.held for task in slot):
                    yield False
                for task in slot:
                    self._compute(task)
            yield True
        self.is_done = True

    def _sent(self, task: StageTask) -> int | None:
        kind = {Work.SEND_FORWARD: "y", Work.SEND_BACKWARD: "dx"}.get(task.work)
        return None if kind is None else self.held[task.stage, kind, task.micro_batch]

    def _input(self, task: StageTask) -> Key:
        if task.work is Work.BACKWARD_WEIGHT:
            return task.stage, "dx", task.micro_batch
        return task.stage, "x" if task.work is Work.FORWARD else "dy", task.micro_batch

    def _compute(self, task: StageTask) -> None:
        stage, number, weight = task.stage, task.micro_batch, task.stage + 2
        match task.work:
            case Work.FORWARD:
                self.calls[stage] = self.calls.get(stage, -1) + 1
                self._make(stage, "y", number, weight * self.held[stage, "x", number] + self.calls[stage])
                return
            case Work.BACKWARD | Work.BACKWARD_INPUT:
                assert (stage, "y", number) in self.held, "a backward behind its forward"
                self._make(stage, "dx", number, weight * self.held[stage, "dy", number])
        if task.work is not Work.BACKWARD_INPUT:
            share = self.held[stage, "x", number] * self.held[stage, "dy", number]
            self.gradients[stage] = self.gradients.get(stage, 0) + share

    def _make(self, stage: int, kind: str, number: int, value: int) -> None:
        """Store a result, also as the input of the neighbouring stage, which may be on the same rank."""
        self.held[stage, kind, number] = value
        if kind == "y" and stage == self.last:
            self.held["loss", "", number] = value
        self.held.setdefault((stage + 1, "x", number) if kind == "y" else (stage - 1, "dy", number), value)


def compute(order: PipelineOrder) -> tuple[list[int], list[int]] | None:
    """Return the losses and each stage's weight gradient; None for a deadlock, or for a read of a missing value."""
    try:
        return _compute(order)
    except (AssertionError, KeyError, IndexError):
        return None


def _compute(order: PipelineOrder) -> tuple[list[int], list[int]] | None:
    last = len(order.stage_ranks) - 1
    ranks = [_Rank(last) for _ in order.ranks]
    for number in range(order.micro_batches):
        for rank in ranks:
            rank.held[0, "x", number] = 3 + 7 * number
            rank.held[last, "dy", number] = 1
    running = [rank.run(order, number) for number, rank in enumerate(ranks)]
    pairs = [(sender, receiver) for sender in range(len(ranks)) for receiver in range(len(ranks)) if sender != receiver]
    while sum(next(rank, False) for rank in running) + sum(_transfer(order, ranks, *pair) for pair in pairs):
        pass
    if any(rank.issued or not rank.is_done for rank in ranks):
        return None
    losses = [ranks[order.stage_ranks[last]].held["loss", "", number] for number in range(order.micro_batches)]
    return losses, [ranks[owner].gradients[stage] for stage, owner in enumerate(order.stage_ranks)]


def _transfer(order: PipelineOrder, ranks: list[_Rank], sender: int, receiver: int) -> bool:
    """Move the next value if both ranks have issued a transfer of one tag; return whether a value moved."""
    found = []
    for rank, other, is_send in ((sender, receiver, True), (receiver, sender, False)):
        slot = ranks[rank].issued[0] if ranks[rank].issued else []
        ours = (end for end in slot if end[0].work.is_send is is_send and order.stage_ranks[_peer(end[0])] == other)
        found.append(next(ours, None))
    sent, received = found
    if sent is None or received is None or sent[0].tag != received[0].tag:
        return False
    for rank, end in ((sender, sent), (receiver, received)):
        ranks[rank].issued[0].remove(end)
        if not ranks[rank].issued[0]:
            ranks[rank].issued.popleft()
    kind = "x" if received[0].work is Work.RECEIVE_FORWARD else "dy"
    assert sent[1] is not None, "what is sent has a value"
    ranks[receiver].held[received[0].stage, kind, received[0].micro_batch] = sent[1]
    return True


def _peer(task: StageTask) -> int:
    """Return the stage at the other end of a transfer."""
    return task.stage + (1 if task.work in (Work.SEND_FORWARD, Work.RECEIVE_BACKWARD) else -1)
