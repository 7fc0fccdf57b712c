"""Time of one step of a pipeline, by its schedule's graph: planning it takes milliseconds, not a simulation.

1. The schedule's graph is built once for a shape (`schedule_graph`); the step is its longest path, one pass over lists.
2. Steps of many micro-batches repeat themselves: their graph is that of fewer with periods put in. So that of few
   micro-batches is built, and the period is run as often as it takes.
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
from cost_models.schedule_orders import ActionKind, repeating_micro_batches, settled_micro_batches
from cost_models.schedules import RankTimes, finish_step, pair_s, reduction
from cost_models.stages import Pipeline, StageTimes

Floats = NDArray[np.float64]

_BATCH = 1000
"""Nodes to run before looking for a period again."""

_CLOSE = 1e-10
"""Times are the same if they differ by this part of the step; rounding is 1e-16 for each of some thousand sums."""


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """The times of a step.

    Args:
        total_s: the whole step.
        ranks: its parts, by pipeline rank.
        nodes: how many nodes of a graph were run.
    """

    total_s: float
    ranks: tuple[RankTimes, ...]
    nodes: int

    @property
    def bubble_s(self) -> float:
        """Mean over ranks of the time spent waiting for other ranks."""
        return sum(times.bubble_s for times in self.ranks) / len(self.ranks)


def pipeline_times(pipeline: Pipeline) -> PipelineTimes:
    """The times of one step.

    Raises:
        CostArgumentError: numbers that the schedule does not admit.

    Example:
        >>> times = pipeline_times(Pipeline("1F1B", [StageTimes(1.0, 1.0, 1.0)] * 4, micro_batches=100_000))
        >>> times.total_s, times.bubble_s
        (300009.0, 9.0)
    """
    run = _run(*_graph(pipeline), pipeline)
    total, parts = _parts(run, pipeline)
    return PipelineTimes(total, parts, len(run.ends))


def pipeline_time(pipeline: Pipeline) -> float:
    """The time of one step alone, as `pipeline_times` has it; errors likewise."""
    run = _run(*_graph(pipeline), pipeline)
    return finish_step(pipeline, run.graph.owners.tolist(), *_rank_ends(run, pipeline), ()).total_s


def _graph(pipeline: Pipeline) -> tuple[ScheduleGraph, Window, int]:
    """A graph of few micro-batches, its steady state, and how many periods are left out of it."""
    schedule, ranks, micro_batches = pipeline.schedule, pipeline.ranks, pipeline.micro_batches
    step = repeating_micro_batches(schedule, ranks, micro_batches) or micro_batches
    few = settled_micro_batches(schedule, ranks, micro_batches, pipeline.virtual_stages)
    while True:
        more = max(0, micro_batches - few) // step
        graph = schedule_graph(
            schedule,
            ranks,
            micro_batches - more * step,
            pipeline.virtual_stages,
            overlap_sends=pipeline.sends_overlap,
            overlap_pairs=pipeline.overlap_pairs,
        )
        window = steady_window(graph, step) if more else Window(len(graph.first), 0, 0)
        if window is not None:
            return graph, window, more
        few += ranks


@dataclass(frozen=True, slots=True)
class _Run:
    """A graph that was run.

    Args:
        graph: with so many periods put in that the last one repeats itself; `marks` are as without.
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


def _run(graph: ScheduleGraph, window: Window, more: int, pipeline: Pipeline) -> _Run:
    """Run a graph with `more` periods put in, until they repeat themselves."""
    of_kinds = _durations(graph, pipeline.stages)
    durations = of_kinds[graph.kinds]
    gather_ends = _gather_ends(graph, pipeline, durations)
    durations[1 : graph.stages + 1] = gather_ends
    first, second, times = graph.first.tolist(), graph.second.tolist(), durations.tolist()
    ends: list[float] = times[: graph.stages + 1]
    add = ends.append

    def run(begin: int, end: int, later: int) -> None:
        """Run the nodes of a range, `later` nodes later in the list."""
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
        durations = of_kinds[longer.kinds]
        durations[1 : graph.stages + 1] = gather_ends
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


def _gather_ends(graph: ScheduleGraph, pipeline: Pipeline, durations: Floats) -> list[float]:
    """By stage, what the start of its first forward waits for.

    That starts after the first bucket, and its last part after the last one; so it ends, if it takes d and the
    gathering lies in [begin, end], no earlier than max(begin + (end - begin) / buckets + d, end + d / buckets).
    """
    ends, buckets = [0.0] * graph.stages, pipeline.buckets
    clocks = [0.0] * graph.ranks
    for stage in np.argsort(graph.gathers[:, 1]).tolist():
        rank, gather_s, duration = (
            graph.owners[stage],
            pipeline.stages[stage].gather_s,
            durations[graph.gathers[stage, 1]],
        )
        if gather_s > 0:
            clocks[rank] += gather_s
            end = clocks[rank]
            ends[stage] = max(end - gather_s + gather_s / buckets, end + duration / buckets - duration)
    return ends


def _parts(run: _Run, pipeline: Pipeline) -> tuple[float, tuple[RankTimes, ...]]:
    """(step, where it goes on each rank), the last period repeated."""
    graph, ends, durations, owners = run.graph, run.ends, run.durations, run.graph.owners.tolist()
    counts = np.ones(len(ends))
    counts[run.place - run.length : run.place] += run.repeats
    slots = graph.slots

    def by_rank(seconds: Floats) -> list[float]:
        return np.bincount(graph.slot_ranks, seconds * counts[slots], graph.ranks).tolist()

    gathers = [0.0] * graph.ranks
    for rank, (join, slot) in zip(owners, graph.gathers.tolist(), strict=True):
        gathers[rank] += float(ends[slot] - durations[slot] - ends[join])
    known = zip(by_rank(durations[slots]), by_rank(_exposed(graph, ends, durations)), gathers, strict=True)
    end = finish_step(pipeline, owners, *_rank_ends(run, pipeline), tuple(known))
    return end.total_s, end.ranks


def _rank_ends(run: _Run, pipeline: Pipeline) -> tuple[list[float], list[float]]:
    """By rank, when its last slot and its last reduction ended, the last period repeated."""
    graph, left_s = run.graph, run.repeats * run.repeat_s
    free, reduced = ([0.0] * graph.ranks for _ in range(2))
    for slot, stage in sorted((slot, stage) for stage, slot in enumerate(graph.lasts.tolist())):
        end, seconds = float(run.ends[slot] + left_s * (slot >= run.place)), pipeline.stages[stage].reduce_s
        rank = int(graph.owners[stage])
        free[rank] = end
        if seconds > 0:
            start = end - float(run.durations[slot])
            _, reduced[rank] = reduction(seconds, reduced[rank], start, end, pipeline.buckets)
    return free, reduced


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
