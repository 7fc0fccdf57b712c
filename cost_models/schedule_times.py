"""Time of one step of a pipeline without simulating it: what `schedules.simulate_pipeline` finds, in milliseconds.

1. The schedule's graph is built once for a shape (`schedule_graph`); the step is its longest path, one pass over lists.
2. Steps of many micro-batches repeat themselves: their graph is that of fewer with periods put in. So that of a few
   rounds is built, and the period is run as often as it takes.
3. Once all nodes that later ones wait for end as much later as those a period before them, every further period takes
   that time (by induction along the list): the rest is multiplied. Such systems become periodic sooner or later
   (Baccelli et al. 1992, Synchronization and Linearity, chapter 3).

That the graph of more micro-batches is that of fewer with periods put in is a property of the schedules, and tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models.schedule_graph import KINDS, SEND, ScheduleGraph, Window, put_in, schedule_graph, steady_window
from cost_models.schedule_orders import ActionKind, repeating_micro_batches
from cost_models.schedules import RankTimes, StageTimes, check_stages, finish_step, pair_s, reduction

Floats = NDArray[np.float64]

_ROUNDS = 3
"""Micro-batches per rank of the first graph that is built; enough for most steady states to show."""

_BATCH = 1000
"""Nodes to run before looking for a period again."""

_CLOSE = 1e-10
"""Times are the same if they differ by this part of the step; rounding is 1e-16 for each of some thousand sums."""


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """A step; see `schedules.PipelineTimeline`.

    `nodes` is how many nodes of a graph were run.
    """

    total_s: float
    ranks: tuple[RankTimes, ...]
    in_flight: tuple[int, ...]
    activation_bytes: tuple[float, ...]
    nodes: int

    @property
    def bubble_s(self) -> float:
        """Mean over ranks of the time spent waiting for other ranks."""
        return sum(times.bubble_s for times in self.ranks) / len(self.ranks)


def pipeline_times(
    schedule: str,
    stages: Sequence[StageTimes],
    micro_batches: int,
    virtual_stages: int = 1,
    *,
    overlap_sends: bool | None = None,
    overlap_pairs: bool = False,
    buckets: int = 1,
    clips_norm: bool = False,
) -> PipelineTimes:
    """The times of one step; arguments and errors as those of `schedules.simulate_pipeline`.

    Example:
        >>> times = pipeline_times("1F1B", [StageTimes(1.0, 1.0, 1.0)] * 4, micro_batches=100_000)
        >>> times.total_s, times.bubble_s, times.in_flight
        (300009.0, 9.0, (4, 3, 2, 1))
    """
    check_stages(stages, virtual_stages, buckets)
    ranks = len(stages) // virtual_stages
    overlaps = schedule != "1F1B" if overlap_sends is None else overlap_sends
    graph, window, more = _graph(schedule, ranks, micro_batches, virtual_stages, overlaps, overlap_pairs)
    run = _run(graph, stages, buckets, window, more)
    total, parts = _parts(run, stages, buckets, clips_norm)
    return PipelineTimes(total, parts, *_held(graph, stages), len(run.ends))


def _graph(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int, overlap_sends: bool, overlap_pairs: bool
) -> tuple[ScheduleGraph, Window, int]:
    """A graph of a few rounds of micro-batches, its steady state, and how many periods are left out of it."""
    step = repeating_micro_batches(schedule, ranks, micro_batches) or micro_batches
    rounds = _ROUNDS
    while True:
        more = max(0, micro_batches - rounds * ranks) // step
        graph = schedule_graph(
            schedule,
            ranks,
            micro_batches - more * step,
            virtual_stages,
            overlap_sends=overlap_sends,
            overlap_pairs=overlap_pairs,
        )
        window = steady_window(graph, step) if more else Window(len(graph.first), 0, 0)
        if window is not None:
            return graph, window, more
        rounds *= 2


@dataclass(frozen=True, slots=True)
class _Run:
    """A graph that was run.

    Args:
        graph: with so many periods put in that the last one repeats itself.
        ends, durations: of its nodes.
        place, length: the last `length` nodes before `place` are to be repeated;
        repeats: so many times more,
        repeat_s: each taking so long.
    """

    graph: ScheduleGraph
    ends: Floats
    durations: Floats
    place: int
    length: int
    repeats: int
    repeat_s: float


def _run(graph: ScheduleGraph, stages: Sequence[StageTimes], buckets: int, window: Window, more: int) -> _Run:
    """Run a graph with `more` periods put in, until they repeat themselves."""
    durations = _durations(graph, stages)[graph.kinds]
    durations[1 : graph.stages + 1] = _gather_ends(graph, stages, durations, buckets)
    first, second, times = graph.first.tolist(), graph.second.tolist(), durations.tolist()
    ends: list[float] = times[: graph.stages + 1]

    def run(begin: int, end: int, later: int) -> None:
        """Run the nodes of a range, `later` nodes later in the list."""
        add = ends.append
        for one, two, time in zip(first[begin:end], second[begin:end], times[begin:end], strict=True):
            a, b = ends[one + later], ends[two + later]
            add((a if a >= b else b) + time)

    place, length, _ = window
    run(graph.stages + 1, place, 0)
    done, repeat_s = 0, None
    while done < more and (repeat_s := _repeat_s(ends, window)) is None:
        for _ in range(min(more - done, 1 + _BATCH // length)):
            done += 1
            run(place - length, place, done * length)
    run(place, len(first), done * length)
    longer = put_in(graph, window, done)
    if done:
        durations = _durations(longer, stages)[longer.kinds]
        durations[1 : graph.stages + 1] = times[1 : graph.stages + 1]
    return _Run(longer, np.array(ends), durations, place + done * length, length, more - done, repeat_s or 0.0)


def _repeat_s(ends: Sequence[float], window: Window) -> float | None:
    """The time of a period, if all nodes that later ones wait for ended as long after those a period before them."""
    _, length, reach = window
    tail = np.array(ends[-length - reach :])
    delays = tail[length:] - tail[:-length]
    return float(delays[-1]) if np.abs(delays - delays[-1]).max() <= _CLOSE * tail[-1] else None


def _durations(graph: ScheduleGraph, stages: Sequence[StageTimes]) -> Floats:
    """Seconds of each kind of node."""
    table = np.zeros(KINDS * len(stages) + 1 + len(stages) ** 2)
    for number, stage in enumerate(stages):
        times = [stage.action_s(kind) for kind in ActionKind]
        table[KINDS * number : KINDS * (number + 1)] = [*times, stage.send_s]
    first_pair = KINDS * len(stages) + 1
    for kind in np.unique(graph.kinds[graph.kinds >= first_pair]).tolist():
        forward, backward = divmod(kind - first_pair, len(stages))
        table[kind] = pair_s(stages[forward], stages[backward])
    return table


def _gather_ends(graph: ScheduleGraph, stages: Sequence[StageTimes], durations: Floats, buckets: int) -> list[float]:
    """By stage, what the start of its first forward waits for.

    That starts after the first bucket, and its last part after the last one; so it ends, if it takes d and the
    gathering lies in [begin, end], no earlier than max(begin + (end - begin) / buckets + d, end + d / buckets).
    """
    ends = [0.0] * len(stages)
    clocks = [0.0] * graph.ranks
    ranks = dict(zip(graph.slots.tolist(), graph.slot_ranks.tolist(), strict=True))
    for stage in np.argsort(graph.gathers[:, 1]).tolist():
        slot = int(graph.gathers[stage, 1])
        gather_s, duration = stages[stage].gather_s, durations[slot]
        if gather_s > 0:
            clocks[ranks[slot]] += gather_s
            end = clocks[ranks[slot]]
            ends[stage] = max(end - gather_s + gather_s / buckets, end + duration / buckets - duration)
    return ends


def _parts(
    run: _Run, stages: Sequence[StageTimes], buckets: int, clips_norm: bool
) -> tuple[float, tuple[RankTimes, ...]]:
    """(step, where it goes on each rank), the last period repeated."""
    graph, ends, durations = run.graph, run.ends, run.durations
    counts = np.ones(len(ends))
    counts[run.place - run.length : run.place] += run.repeats
    later = ends.copy()
    later[run.place :] += run.repeats * run.repeat_s
    slots = graph.slots

    def by_rank(seconds: Floats) -> list[float]:
        return np.bincount(graph.slot_ranks, seconds * counts[slots], graph.ranks).tolist()

    ranks = dict(zip(slots.tolist(), graph.slot_ranks.tolist(), strict=True))
    gathers, free, reduced = ([0.0] * graph.ranks for _ in range(3))
    for join, slot in graph.gathers.tolist():
        gathers[ranks[slot]] += float(ends[slot] - durations[slot] - ends[join])
    for slot, stage in sorted((slot, stage) for stage, slot in enumerate(graph.lasts.tolist())):
        rank, end, seconds = ranks[slot], float(later[slot]), stages[stage].reduce_s
        free[rank] = end
        if seconds > 0:
            _, reduced[rank] = reduction(seconds, reduced[rank], end - float(durations[slot]), end, buckets)
    owners = [ranks[slot] for slot in graph.lasts.tolist()]
    known = zip(by_rank(durations[slots]), by_rank(_exposed(graph, ends, durations)), gathers, strict=True)
    end = finish_step(stages, owners, free, reduced, tuple(known), clips_norm)
    return end.total_s, end.ranks


def _exposed(graph: ScheduleGraph, ends: Floats, durations: Floats) -> Floats:
    """By slot, how long its rank waits while a transfer to it, or one of its own that it waits for, is under way.

    The length of the union of the transfers' intervals from the end of the slot before on.
    """
    begins = ends[graph.begins]
    joins = KINDS * graph.stages
    is_send = (graph.kinds < joins) & (graph.kinds % KINDS == SEND)
    starts = (ends - np.where(is_send, durations, 0.0))[graph.transfers]
    finishes = ends[graph.transfers]
    order = np.argsort(starts, axis=1)
    starts, finishes = (np.take_along_axis(table, order, axis=1) for table in (starts, finishes))
    total = np.zeros(len(begins))
    for start, finish in zip(starts.T, finishes.T, strict=True):
        total += np.maximum(0.0, finish - np.maximum(start, begins))
        begins = np.maximum(begins, finish)
    return total


def _held(graph: ScheduleGraph, stages: Sequence[StageTimes]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """By rank, the most micro-batches and the most bytes that it holds at once, each stage's counted."""
    ranks, owners, signs = graph.held.T
    sizes = np.array([stage.activation_bytes for stage in stages])[owners]
    peaks = [
        (int(np.cumsum(signs[mine]).max()), float(np.cumsum((signs * sizes)[mine]).max()))
        for mine in (ranks == rank for rank in range(graph.ranks))
    ]
    return tuple(count for count, _ in peaks), tuple(size for _, size in peaks)
