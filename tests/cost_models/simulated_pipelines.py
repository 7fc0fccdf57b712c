"""The reference for `schedule_times`: a pipeline's actions, run rank by rank with transfers between neighbours.

Each pipeline rank stands for all ranks at its place (they do the same at the same time). An action starts when its
rank is free and its inputs are there:

    F(s, i)           after F(s - 1, i), sent here if that stage sits on another rank
    B or I(s, i)      after F(s, i) and after B or I(s + 1, i), sent here likewise
    W(s, i)           after I(s, i)

1. Transfers run on streams of their own, one per ordered pair of ranks, in the order in which their values are made.
   The runtime either overlaps them with compute (receives are posted early, nobody waits for a send), or it does not:
   torch's 1F1B (as Megatron's) swaps, between a forward and a backward, what it has made for what it needs next, both
   neighbours waiting for the swap. Other schedules without overlap wait for each of their sends.
2. The gradients of a stage are reduced over data parallel ranks after its last backward, on a stream of their own; cut
   into b buckets, all but the last bucket may run under that backward. Parameters that are gathered at the start of the
   step (ZeRO, Rajbhandari et al. 2020) mirror that: the first forward starts with the first bucket.
3. The update follows, on all ranks at once where the gradients' norm is clipped.

What a rank does not compute is a transfer, gather or reduction that it waits for and that is under way, or bubble.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from cost_models.schedule_orders import Action, ActionKind, Slot, rank_orders, stage_ranks
from cost_models.schedules import RankTimes, finish_step, pair_s, reduction
from cost_models.stages import Pipeline, StageTimes
from cost_models.timeline import COMPUTE, Span, Timeline

_FORWARD, _WHOLE, _INPUT, _WEIGHT = ActionKind


def peak_in_flight(order: Sequence[Slot], sizes: Mapping[int, float] | None = None) -> float:
    """Most that a rank holds at once of what forwards save for backwards.

    What F saves is held until B, or until W where the backward is cut (W reads the inputs of the stage's products).

    Args:
        order: what the rank runs.
        sizes: what one micro-batch saves, by stage, in any unit; default 1 each, so that micro-batches are counted.
    """
    held, peak = 0.0, 0.0
    for slot in order:
        for action in slot:
            size = 1.0 if sizes is None else sizes[action.stage]
            if action.kind is _FORWARD:
                held += size
                peak = max(peak, held)
            elif action.kind is not _INPUT:
                held -= size
    return peak


@dataclass(frozen=True, slots=True)
class PipelineTimeline:
    """A simulated step.

    Args:
        schedule, micro_batches: what was simulated.
        total_s: the whole step.
        ranks: where it goes, by pipeline rank.
        in_flight: by rank, the most micro-batches held at once between forward and backward (each stage's counts).
        activation_bytes: by rank, the most bytes that they hold at once.
    """

    schedule: str
    micro_batches: int
    total_s: float
    ranks: tuple[RankTimes, ...]
    in_flight: tuple[int, ...]
    activation_bytes: tuple[float, ...]
    _events: Sequence[tuple[int, str, str | Slot, float, float]] = field(repr=False, compare=False)

    @property
    def bubble_s(self) -> float:
        """Mean over ranks of the time spent waiting for other ranks."""
        return self.breakdown["bubble"]

    @property
    def bubble_fraction(self) -> float:
        """The bubble as a fraction of the step."""
        return self.bubble_s / self.total_s if self.total_s > 0 else 0.0

    @property
    def exposed_communication_s(self) -> float:
        """Mean over ranks of the time spent waiting for transfers, gathers and reductions under way."""
        return sum(seconds for name, seconds in self.breakdown.items() if name.startswith("exposed"))

    @property
    def breakdown(self) -> dict[str, float]:
        """Mean over ranks of the parts of `RankTimes`, by their names without unit; they sum to `total_s`."""
        return {
            part.name.removesuffix("_s"): sum(getattr(times, part.name) for times in self.ranks) / len(self.ranks)
            for part in fields(RankTimes)
        }

    @property
    def timeline(self) -> Timeline:
        """All that ran: one process per pipeline rank; transfers are streams of their sender."""
        spans = (
            Span(name if isinstance(name, str) else "+".join(map(str, name)), stream, start, end, rank)
            for rank, stream, name, start, end in self._events
        )
        return Timeline(tuple(spans), tuple(f"pipeline rank {rank}" for rank in range(len(self.ranks))))


def simulate_pipeline(pipeline: Pipeline) -> PipelineTimeline:
    """Simulate one step.

    Raises:
        CostArgumentError: numbers that the schedule does not admit.

    Example:
        >>> line = simulate_pipeline(Pipeline("1F1B", [StageTimes(1.0, 1.0, 1.0)] * 4, micro_batches=8))
        >>> line.total_s, line.bubble_s, line.in_flight
        (33.0, 9.0, (4, 3, 2, 1))
    """
    schedule, ranks, stages = pipeline.schedule, pipeline.ranks, pipeline.stages
    orders = rank_orders(schedule, ranks, pipeline.micro_batches, pipeline.virtual_stages)
    run = _Run(
        pipeline=pipeline,
        owners=stage_ranks(schedule, ranks, pipeline.virtual_stages),
        orders=orders if pipeline.overlap_pairs else tuple(_one_by_one(order) for order in orders),
    )
    run.all_actions()
    total, parts = run.finish()
    saved = {index: stage.activation_bytes for index, stage in enumerate(stages)}
    return PipelineTimeline(
        schedule=schedule,
        micro_batches=pipeline.micro_batches,
        total_s=total,
        ranks=parts,
        in_flight=tuple(int(peak_in_flight(order)) for order in orders),
        activation_bytes=tuple(peak_in_flight(order, saved) for order in orders),
        _events=run.events,
    )


def _one_by_one(order: Iterable[Slot]) -> tuple[Slot, ...]:
    return tuple((action,) for slot in order for action in slot)


_Value = tuple[int, bool, int]
"""What a stage makes of a micro-batch: (stage, whether by its forward, micro-batch)."""

_Interval = tuple[float, float]


@dataclass(slots=True)
class _Run:
    """The state of a simulation: what is made, sent and under way, and when each rank is free."""

    pipeline: Pipeline
    owners: Sequence[int]
    orders: Sequence[Sequence[Slot]]
    events: list[tuple[int, str, str | Slot, float, float]] = field(default_factory=list)
    made: dict[_Value, float] = field(default_factory=dict)
    sent: dict[_Value, _Interval] = field(default_factory=dict)
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    gathered: dict[int, _Interval] = field(default_factory=dict)
    left: dict[int, int] = field(init=False)
    places: list[int] = field(init=False)
    free: list[float] = field(init=False)
    reduced: list[float] = field(init=False)
    computed: list[float] = field(init=False)
    sends: list[float] = field(init=False)
    gathers: list[float] = field(init=False)
    owed: list[list[_Value]] = field(init=False)

    def __post_init__(self) -> None:
        ranks = range(len(self.orders))
        self.left = dict.fromkeys(range(len(self.stages)), self.pipeline.micro_batches)
        self.places, self.owed = [0 for _ in ranks], [[] for _ in ranks]
        self.free, self.reduced, self.computed, self.sends, self.gathers = ([0.0 for _ in ranks] for _ in range(5))
        for rank in ranks:
            self._gather(rank)

    @property
    def stages(self) -> Sequence[StageTimes]:
        """In the order of the model."""
        return self.pipeline.stages

    def all_actions(self) -> None:
        """Run the orders to their ends, each rank as far as it gets before the next."""
        busy = True
        while busy:
            busy = False
            for rank, order in enumerate(self.orders):
                while self.places[rank] < len(order) and (self._receive(rank) or self._run_next(rank)):
                    busy = True
        assert self.places == [len(order) for order in self.orders], "the orders of a schedule can run"

    def finish(self) -> tuple[float, tuple[RankTimes, ...]]:
        """(step, parts by rank) once the updates have run."""
        known = tuple(zip(self.computed, self.sends, self.gathers, strict=True))
        end = finish_step(self.pipeline, self.owners, self.free, self.reduced, known)
        for rank, (start, times) in enumerate(zip(end.update_starts_s, end.ranks, strict=True)):
            if times.update_s > 0:
                self.events.append((rank, COMPUTE, "update", start, start + times.update_s))
        return end.total_s, end.ranks

    def _gather(self, rank: int) -> None:
        """The rank's parameters, stage after stage in the order of their first use."""
        clock = 0.0
        for stage in dict.fromkeys(action.stage for slot in self.orders[rank] for action in slot):
            duration = self.stages[stage].gather_s
            if duration > 0:
                self.gathered[stage] = (clock, clock + duration)
                self.events.append((rank, "gather", f"gather {stage}", clock, clock + duration))
                clock += duration

    def _receive(self, rank: int) -> bool:
        """In a schedule that swaps, begin the transfer to the rank's next action, now that the rank waits for it."""
        if not self.pipeline.swaps:
            return False
        value = self._input(self.orders[rank][self.places[rank]][0])
        if value is None or value in self.sent or value not in self.made:
            return False
        self._send(value, rank, self.free[rank])
        return True

    def _run_next(self, rank: int) -> bool:
        """Run the rank's next slot if all that it waits for is known; else say that it is not."""
        slot = self.orders[rank][self.places[rank]]
        transfers: list[_Interval] = []
        for action in slot:
            value = self._input(action)
            if value is not None:
                interval = self._there(value, rank)
                if interval is None:
                    return False
                transfers.append(interval)
        for value in self.owed[rank]:
            if value not in self.sent:
                return False
            transfers.append(self.sent[value])
        begin = start = self.free[rank]
        for _, end in transfers:
            start = max(start, end)
        if start > begin:
            self.sends[rank] += _covered(transfers, begin, start)
        self.owed[rank].clear()
        self._run(rank, slot, start)
        return True

    def _input(self, action: Action) -> _Value | None:
        """What an action waits for from the neighbouring stage, if anything."""
        stage, kind, index = action
        if kind is _FORWARD:
            return (stage - 1, True, index) if stage > 0 else None
        if kind is _WEIGHT or stage == len(self.stages) - 1:
            return None
        return (stage + 1, False, index)

    def _there(self, value: _Value, rank: int) -> _Interval | None:
        """The transfer that brings a value to a rank, of no length if it was made here; None while not known."""
        if self.owners[value[0]] == rank:
            end = self.made.get(value)
            return None if end is None else (end, end)
        return self.sent.get(value)

    def _run(self, rank: int, slot: Slot, start: float) -> None:
        """Run a slot whose inputs are there at `start`."""
        duration = self._duration(slot)
        first = slot[0]
        if first.kind is _FORWARD and first.micro_batch == 0 and first.stage in self.gathered:
            start, end = self._gathered(rank, first.stage, start, duration)
        else:
            end = start + duration
        self.computed[rank] += duration
        self.events.append((rank, COMPUTE, slot, start, end))
        self.free[rank] = end
        self.places[rank] += 1
        for action in slot:
            self._made(rank, action, start, end)

    def _duration(self, slot: Slot) -> float:
        if len(slot) == 1:
            return self.stages[slot[0].stage].action_s(slot[0].kind)
        return pair_s(*(self.stages[action.stage] for action in slot))

    def _gathered(self, rank: int, stage: int, start: float, duration: float) -> _Interval:
        """When a stage's first forward runs: after the first bucket, its last part after the last bucket."""
        begin, finish = self.gathered[stage]
        ready = begin + (finish - begin) / self.pipeline.buckets
        self.gathers[rank] += max(0.0, ready - start)
        start = max(start, ready)
        end = max(start + duration, finish + duration / self.pipeline.buckets)
        self.gathers[rank] += end - start - duration
        return start, end

    def _made(self, rank: int, action: Action, start: float, end: float) -> None:
        """Note what an action made, send it on if transfers overlap, reduce what is complete."""
        stage, kind, index = action
        if kind is not _WEIGHT:
            value = (stage, kind is _FORWARD, index)
            target = stage + 1 if kind is _FORWARD else stage - 1
            self.made[value] = end
            if 0 <= target < len(self.stages) and self.owners[target] != rank:
                if not self.pipeline.swaps:
                    self._send(value, self.owners[target], end)
                if not self.pipeline.sends_overlap and self._waits_for_send(rank, kind):
                    self.owed[rank].append(value)
        if kind in (_WHOLE, _WEIGHT):
            self.left[stage] -= 1
            if self.left[stage] == 0:
                self._reduce(rank, stage, start, end)

    def _waits_for_send(self, rank: int, kind: ActionKind) -> bool:
        """Whether the rank's next slot waits for what this action sends: always, or, where ranks swap, at turns."""
        if not self.pipeline.swaps or self.places[rank] == len(self.orders[rank]):
            return not self.pipeline.swaps
        return self.orders[rank][self.places[rank]][0].kind is not kind

    def _send(self, value: _Value, target: int, not_before: float) -> None:
        stage, is_forward, index = value
        source = self.owners[stage]
        duration = self.stages[stage if is_forward else stage - 1].send_s
        start = max(self.made[value], not_before, self.links.get((source, target), 0.0))
        self.links[source, target] = start + duration
        self.sent[value] = (start, start + duration)
        if duration > 0:
            name = f"send {stage}{'F' if is_forward else 'B'}{index}"
            self.events.append((source, f"to rank {target}", name, start, start + duration))

    def _reduce(self, rank: int, stage: int, start: float, end: float) -> None:
        """Reduce a stage's gradients, of which the last bucket's come at `end`, the others' evenly since `start`."""
        duration = self.stages[stage].reduce_s
        if duration > 0:
            begin, self.reduced[rank] = reduction(duration, self.reduced[rank], start, end, self.pipeline.buckets)
            self.events.append((rank, "reduce", f"reduce {stage}", begin, self.reduced[rank]))


def _covered(intervals: Sequence[_Interval], begin: float, end: float) -> float:
    """Length of the union of intervals within [begin, end]."""
    total, position = 0.0, begin
    for first, last in sorted(intervals):
        total += max(0.0, min(last, end) - max(first, position))
        position = max(position, last)
    return total
