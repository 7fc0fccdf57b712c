"""Time of a pipeline's step: its order is run rank by rank, with what crosses stages under way between ranks.

1. A task starts when its rank is free and all that it reads is there; the second half of a cut backward reads nothing.
2. What a task makes for other ranks is sent when it ends, beside computation; messages of one pair of ranks follow each
   other. Nobody waits for a send.
3. What is computed once for all micro-batches runs before a stage's first forward. The update follows the last task, on
   all ranks at once where the norm of the gradients is that of all.

A rank that does not compute waits for a message that is under way, or for other ranks (the bubble).
`cost_models.schedules` prices schedules that are not lowered yet; where stages hand on to their neighbours alone, both
say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.ir.pipeline_order import PipelineOrder, Slot, StageTask, Work
from autoshard.ir.staged import Crossing
from cost_models.timeline import COMPUTE, Span, Timeline


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a stage: forward, backward (or its halves) of a micro-batch; the part that runs once; the update."""

    forward: float
    backward: float
    backward_input: float = 0.0
    backward_weight: float = 0.0
    once: float = 0.0
    update: float = 0.0

    def of(self, work: Work) -> float:
        """Seconds of a task that computes."""
        match work:
            case Work.FORWARD:
                return self.forward
            case Work.BACKWARD:
                return self.backward
            case Work.BACKWARD_INPUT:
                return self.backward_input
        return self.backward_weight


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """Where a step goes on one pipeline rank; the parts sum to the step.

    Args:
        computed: running tasks, what runs once, and the update.
        waited: waiting while a message to it is under way.
        bubble: waiting for other ranks.
    """

    computed: float
    waited: float
    bubble: float


@dataclass(frozen=True, slots=True)
class OrderTimes:
    """A simulated step: the whole, where it goes by pipeline rank, and what ran when."""

    total_s: float
    ranks: tuple[RankSeconds, ...]
    timeline: Timeline


def simulate_order(
    order: PipelineOrder,
    stages: Sequence[StageSeconds],
    crossings: Mapping[Crossing, float],
    *,
    clips_norm: bool = False,
) -> OrderTimes:
    """Simulate a step.

    Args:
        order: what each rank does; one that is proven to end.
        stages: what each stage takes.
        crossings: values that cross stages, with the seconds that one takes between ranks.
        clips_norm: the update waits for the gradients of all ranks.

    Example:
        >>> from passes.lowering.order_pipeline import order_pipeline
        >>> from autoshard.ir.staged import Crossing
        >>> sent = {Crossing("x", 0, 1, True): 0.5, Crossing("x", 1, 0, False): 0.5}
        >>> simulate_order(order_pipeline("1F1B", 2, 2), [StageSeconds(1.0, 2.0)] * 2, sent).total_s
        10.0
    """
    run = _Run(order, stages, crossings)
    run.all_tasks()
    return run.finish(clips_norm=clips_norm)


_Key = tuple[Crossing, int]


@dataclass(slots=True)
class _Run:
    """A step under way: by rank, its place and when it is free; by value, when its transfer began and ended."""

    order: PipelineOrder
    stages: Sequence[StageSeconds]
    crossings: Mapping[Crossing, float]
    sent: dict[_Key, tuple[float, float]] = field(default_factory=dict)
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    spans: list[Span] = field(default_factory=list)
    reads: dict[tuple[int, bool], list[Crossing]] = field(default_factory=dict)
    makes: dict[tuple[int, bool], list[Crossing]] = field(default_factory=dict)
    slots: list[list[Slot]] = field(init=False)
    free: list[float] = field(init=False)
    computed: list[float] = field(init=False)
    waited: list[float] = field(init=False)

    def __post_init__(self) -> None:
        for item in self.crossings:
            self.reads.setdefault((item.reader, item.is_forward), []).append(item)
            self.makes.setdefault((item.maker, item.is_forward), []).append(item)
        self.slots = [[slot for slot in reversed(slots) if not slot[0].work.is_transfer] for slots in self.order.ranks]
        self.free, self.computed, self.waited = ([0.0 for _ in self.slots] for _ in range(3))

    def all_tasks(self) -> None:
        while any(self.slots):
            turns = [self._run_next(rank) for rank, slots in enumerate(self.slots) if slots]
            assert any(turns), "the order was proven to end"

    def _run_next(self, rank: int) -> bool:
        """Run the rank's next slot if all that it reads is known; else say that it is not."""
        needed = [(item, task.micro_batch) for task in self.slots[rank][-1] for item in self._read_by(task)]
        if not all(key in self.sent for key in needed):
            return False
        intervals = [self.sent[key] for key in needed]
        start = max([self.free[rank], *(end for _, end in intervals)])
        self.waited[rank] += _covered(intervals, self.free[rank], start)
        for task in self.slots[rank].pop():
            start = self._run(rank, task, start)
        self.free[rank] = start
        return True

    def _read_by(self, task: StageTask) -> Sequence[Crossing]:
        if task.work is Work.BACKWARD_WEIGHT:
            return ()
        return self.reads.get((task.stage, task.work is Work.FORWARD), ())

    def _run(self, rank: int, task: StageTask, start: float) -> float:
        """When a task ends that starts at `start`."""
        times = self.stages[task.stage]
        seconds = times.of(task.work)
        if task.work is Work.FORWARD and task.stage not in self.begun:
            self.begun.add(task.stage)
            seconds += times.once
        end = start + seconds
        self.computed[rank] += seconds
        self.spans.append(Span(str(task), COMPUTE, start, end, rank))
        if task.work is not Work.BACKWARD_WEIGHT:
            for item in self.makes.get((task.stage, task.work is Work.FORWARD), ()):
                self._send(item, task.micro_batch, end)
        return end

    def _send(self, item: Crossing, micro_batch: int, made: float) -> None:
        pair = self.order.stage_ranks[item.maker], self.order.stage_ranks[item.reader]
        if pair[0] == pair[1]:
            self.sent[item, micro_batch] = made, made
            return
        start = max(made, self.links.get(pair, 0.0))
        end = self.links[pair] = start + self.crossings[item]
        self.sent[item, micro_batch] = start, end
        name = f"{item.maker}{'F' if item.is_forward else 'B'}{micro_batch} {item.name}"
        self.spans.append(Span(name, f"to rank {pair[1]}", start, end, pair[0]))

    def finish(self, *, clips_norm: bool) -> OrderTimes:
        starts = [max(self.free)] * len(self.free) if clips_norm else self.free
        updates = [0.0 for _ in self.free]
        for stage, rank in zip(self.stages, self.order.stage_ranks, strict=True):
            updates[rank] += stage.update
        ends = [start + update for start, update in zip(starts, updates, strict=True)]
        total = max(ends)
        for rank, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end > start:
                self.spans.append(Span("update", COMPUTE, start, end, rank))
        ranks = tuple(
            RankSeconds(computed + update, waited, max(0.0, total - computed - update - waited))
            for computed, update, waited in zip(self.computed, updates, self.waited, strict=True)
        )
        names = tuple(f"pipeline rank {rank}" for rank in range(len(ranks)))
        return OrderTimes(total, ranks, Timeline(tuple(self.spans), names))


def _covered(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Length of the union of intervals within [begin, end]."""
    total, position = 0.0, begin
    for first, last in sorted(intervals):
        total += max(0.0, min(last, end) - max(first, position))
        position = max(position, last)
    return total
