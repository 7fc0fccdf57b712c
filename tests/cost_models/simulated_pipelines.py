"""The reference for `schedule_times`: a pipeline's actions, run rank by rank with transfers between neighbours.

Each pipeline rank stands for all ranks at its place (they do the same at the same time). An action starts when its
rank is free and its inputs are there:

    F(s, i)           after F(s - 1, i), sent here if that stage sits on another rank
    B or I(s, i)      after F(s, i) and after B or I(s + 1, i), sent here likewise
    W(s, i)           after I(s, i)

Transfers run on streams of their own, one per ordered pair of ranks, in the order in which their values are made.
The runtime either overlaps them with compute (receives are posted early, nobody waits for a send), or it does not:
torch's 1F1B (as Megatron's) swaps, between a forward and a backward, what it has made for what it needs next, both
neighbours waiting for the swap. Other schedules without overlap wait for each of their sends.

A rank that does not compute waits for a transfer that is under way, or for other ranks (the bubble).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cost_models.schedule_orders import SCHEDULES, Action, ActionKind, Slot, rank_orders, stage_ranks
from cost_models.schedule_times import RankTimes
from cost_models.stages import Pipeline, StageTimes

_FORWARD, _, _INPUT, _WEIGHT = ActionKind


def peak_in_flight(order: Iterable[Slot]) -> int:
    """Most micro-batches that a rank holds at once: from F to B, or to W where the backward is cut."""
    held = peak = 0
    for action in (action for slot in order for action in slot):
        if action.kind is _FORWARD:
            held += 1
            peak = max(peak, held)
        elif action.kind is not _INPUT:
            held -= 1
    return peak


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The whole step, seconds, and where it goes, by pipeline rank."""

    total_s: float
    ranks: tuple[RankTimes, ...]

    @property
    def bubble_s(self) -> float:
        """Mean over ranks."""
        return sum(times.bubble_s for times in self.ranks) / len(self.ranks)


def simulate_pipeline(pipeline: Pipeline) -> SimulatedStep:
    """Simulate one step.

    Raises:
        CostArgumentError: numbers that the schedule does not admit.

    Example:
        >>> line = simulate_pipeline(Pipeline("1F1B", [StageTimes(1.0, 1.0, 1.0)] * 4, micro_batches=8))
        >>> line.total_s, line.bubble_s
        (33.0, 9.0)
    """
    schedule, ranks = pipeline.schedule, pipeline.ranks
    orders = rank_orders(schedule, ranks, pipeline.micro_batches, pipeline.virtual_stages)
    run = _Run(
        pipeline=pipeline,
        owners=stage_ranks(schedule, ranks, pipeline.virtual_stages),
        orders=[[action for slot in order for action in slot] for order in orders],
    )
    run.all_actions()
    return run.finish()


_Value = tuple[int, bool, int]
"""A stage's result of a micro-batch: (stage, whether by its forward, micro-batch)."""

_Interval = tuple[float, float]


@dataclass(slots=True)
class _Run:
    """The state of a simulation: what is made, sent and under way, and when each rank is free."""

    pipeline: Pipeline
    owners: Sequence[int]
    orders: Sequence[Sequence[Action]]
    made: dict[_Value, float] = field(default_factory=dict)
    sent: dict[_Value, _Interval] = field(default_factory=dict)
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    places: list[int] = field(init=False)
    free: list[float] = field(init=False)
    computed: list[float] = field(init=False)
    sends: list[float] = field(init=False)
    owed: list[list[_Value]] = field(init=False)

    def __post_init__(self) -> None:
        ranks = range(len(self.orders))
        self.places, self.owed = [0 for _ in ranks], [[] for _ in ranks]
        self.free, self.computed, self.sends = ([0.0 for _ in ranks] for _ in range(3))

    @property
    def stages(self) -> Sequence[StageTimes]:
        """In the order of the model."""
        return self.pipeline.stages

    @property
    def swaps(self) -> bool:
        """Whether neighbours exchange what they have made, both waiting for it."""
        return SCHEDULES[self.pipeline.schedule].swaps and not self.pipeline.sends_overlap

    def all_actions(self) -> None:
        """Run the orders to their ends, each rank as far as it gets before the next."""
        busy = True
        while busy:
            busy = False
            for rank, order in enumerate(self.orders):
                while self.places[rank] < len(order) and (self._receive(rank) or self._run_next(rank)):
                    busy = True
        assert self.places == [len(order) for order in self.orders], "the orders of a schedule can run"

    def finish(self) -> SimulatedStep:
        """The step, once all actions have run."""
        total = max(self.free)
        parts = zip(self.computed, self.sends, strict=True)
        return SimulatedStep(total, tuple(RankTimes(busy, sends, total - busy - sends) for busy, sends in parts))

    def _receive(self, rank: int) -> bool:
        """In a schedule that swaps, begin the transfer to the rank's next action, now that the rank waits for it."""
        if not self.swaps:
            return False
        value = self._input(self.orders[rank][self.places[rank]])
        if value is None or value in self.sent or value not in self.made:
            return False
        self._send(value, rank, self.free[rank])
        return True

    def _run_next(self, rank: int) -> bool:
        """Run the rank's next action if all that it waits for is known; else say that it is not."""
        action = self.orders[rank][self.places[rank]]
        value = self._input(action)
        arrival = None if value is None else self._there(value, rank)
        if (value is not None and arrival is None) or any(value not in self.sent for value in self.owed[rank]):
            return False
        transfers = [*([arrival] if arrival else []), *(self.sent[value] for value in self.owed[rank])]
        begin = self.free[rank]
        start = max([begin, *(end for _, end in transfers)])
        self.sends[rank] += _covered(transfers, begin, start)
        self.owed[rank].clear()
        end = start + self.stages[action.stage].actions_s[action.kind]
        self.computed[rank] += end - start
        self.free[rank] = end
        self.places[rank] += 1
        self._made(rank, action, end)
        return True

    def _input(self, action: Action) -> _Value | None:
        """The action of the neighbouring stage that an action waits for, if any."""
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

    def _made(self, rank: int, action: Action, end: float) -> None:
        """Note what an action made, and send it on if transfers overlap."""
        stage, kind, index = action
        if kind is _WEIGHT:
            return
        value = (stage, kind is _FORWARD, index)
        target = stage + 1 if kind is _FORWARD else stage - 1
        self.made[value] = end
        if 0 <= target < len(self.stages) and self.owners[target] != rank:
            if not self.swaps:
                self._send(value, self.owners[target], end)
            if not self.pipeline.sends_overlap and self._waits_for_send(rank, kind):
                self.owed[rank].append(value)

    def _waits_for_send(self, rank: int, kind: ActionKind) -> bool:
        """Whether the rank's next action waits for what this one sends: always, or, where ranks swap, at turns."""
        if not self.swaps or self.places[rank] == len(self.orders[rank]):
            return not self.swaps
        return self.orders[rank][self.places[rank]].kind is not kind

    def _send(self, value: _Value, target: int, not_before: float) -> None:
        stage, is_forward, _ = value
        source = self.owners[stage]
        duration = self.stages[stage if is_forward else stage - 1].send_s
        start = max(self.made[value], not_before, self.links.get((source, target), 0.0))
        self.links[source, target] = start + duration
        self.sent[value] = (start, start + duration)


def _covered(intervals: Sequence[_Interval], begin: float, end: float) -> float:
    """Length of the union of intervals within [begin, end]."""
    total, position = 0.0, begin
    for first, last in sorted(intervals):
        total += max(0.0, min(last, end) - max(first, position))
        position = max(position, last)
    return total
