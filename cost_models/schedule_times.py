"""Time of one step of a pipeline, by the graph of its order: the longest path, one pass over lists.

A rank computes, waits for a transfer that is under way, or waits for other ranks (the bubble).

A plan's order is run as it is (`order_times`). A schedule that is only priced (`pipeline_times`) takes milliseconds:

1. Its graph is built once for a shape (`schedule_graph`).
2. Steps of many micro-batches repeat themselves: their graph is that of fewer with periods put in. So that of few
   micro-batches is built, and the period is run as often as it takes.
3. Once all nodes that later ones wait for end as much later as those a period before them, every further period takes
   that time (by induction along the list): the rest is multiplied. Such systems become periodic sooner or later
   (Baccelli et al. 1992, Synchronization and Linearity, chapter 3).

That the graph of more micro-batches is that of fewer with periods put in is a property of the schedules, and tested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models.schedule_graph import (
    OrderGraph,
    Transfer,
    Window,
    neighbours,
    order_graph,
    put_in,
    schedule_graph,
    steady_window,
)
from cost_models.schedule_orders import (
    Action,
    ActionKind,
    Rows,
    last_forward_stage,
    repeating_micro_batches,
    settled_micro_batches,
)
from cost_models.stages import Pipeline
from cost_models.timeline import COMPUTE, Span, Timeline

Floats = NDArray[np.float64]

_BATCH = 1000
"""Nodes to run before looking for a period again."""

_CLOSE = 1e-10
"""Times are the same if they differ by this part of the step; rounding is 1e-16 for each of some thousand sums."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Parts of the step on one pipeline rank, seconds; they sum to the step.

    Args:
        compute_s: forwards and backwards, work that runs once, and the update.
        exposed_send_s: waiting for transfers under way.
        bubble_s: the rest: waiting for other ranks.
    """

    compute_s: float
    exposed_send_s: float
    bubble_s: float


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
        >>> from cost_models.stages import StageTimes
        >>> times = pipeline_times(Pipeline("1F1B", [StageTimes(1.0, 1.0, 1.0)] * 4, micro_batches=100_000))
        >>> times.total_s, times.bubble_s
        (300009.0, 9.0)
    """
    return _times(_run_pipeline(pipeline), np.zeros(pipeline.ranks), clips_norm=False)


def pipeline_time(pipeline: Pipeline) -> float:
    """The time of one step alone, as `pipeline_times` has it; errors likewise."""
    return float(_run_pipeline(pipeline).rank_ends.max())


def order_times(
    orders: Sequence[Rows],
    owners: Sequence[int],
    actions_s: Floats,
    transfers: Mapping[Transfer, float],
    *,
    once_s: Floats,
    update_s: Floats,
    clips_norm: bool = False,
) -> tuple[PipelineTimes, Timeline]:
    """The times of a step that runs an order, and its timeline.

    Args:
        orders: by rank, its actions; they can run to their end.
        owners: by stage, its rank.
        actions_s: [stages, kinds] seconds of each kind of action.
        transfers: values that stages make for each other, with the seconds that one takes between ranks.
        once_s: by stage, seconds that its first forward takes more.
        update_s: by stage, seconds of its update, after the rank's last action.
        clips_norm: updates wait for the gradients of all ranks.
    """
    graph = order_graph(orders, owners, tuple(transfers))
    run = _run(graph, Window(len(graph.first), 0, 0), 0, actions_s, list(transfers.values()), once_s)
    updates = np.bincount(owners, update_s, len(orders)).astype(np.float64)
    return _times(run, updates, clips_norm=clips_norm), _timeline(run, owners, tuple(transfers), updates, clips_norm)


def _run_pipeline(pipeline: Pipeline) -> _Run:
    """Run a graph of few micro-batches, periods put into its steady state."""
    schedule, ranks, micro_batches = pipeline.schedule, pipeline.ranks, pipeline.micro_batches
    virtual, stages = pipeline.virtual_stages, pipeline.stages
    step = repeating_micro_batches(schedule, ranks, micro_batches) or micro_batches
    few = settled_micro_batches(schedule, ranks, micro_batches, virtual)
    window = None
    while window is None:
        more = max(0, micro_batches - few) // step
        graph = schedule_graph(
            schedule, ranks, micro_batches - more * step, virtual, overlap_sends=pipeline.sends_overlap
        )
        last = last_forward_stage(schedule, ranks, virtual)
        window = steady_window(graph, last, step) if more else Window(len(graph.first), 0, 0)
        few += ranks
    actions_s = np.array([stage.actions_s for stage in stages])
    sends = [stages[min(item.maker, item.reader)].send_s for item in neighbours(len(stages))]
    return _run(graph, window, more, actions_s, sends, np.zeros(len(stages)))


@dataclass(frozen=True, slots=True)
class _Run:
    """A graph that was run.

    Args:
        graph: with so many periods put in that the last one repeats itself; `actions` and `sent` are as without.
        ends, durations: of its nodes.
        place, length: the last `length` nodes before `place` are to be repeated;
        repeats: so many times more,
        repeat_s: each taking so long.
    """

    graph: OrderGraph
    ends: Floats
    durations: Floats
    place: int
    length: int
    repeats: int
    repeat_s: float

    @property
    def rank_ends(self) -> Floats:
        """By rank, when its last slot ended, the last period repeated."""
        return self.ends[self.graph.lasts] + self.repeats * self.repeat_s


def _run(
    graph: OrderGraph, window: Window, more: int, actions_s: Floats, sends: Sequence[float], once_s: Floats
) -> _Run:
    """Run a graph with `more` periods put in, until they repeat themselves."""
    of_kinds = np.concatenate([actions_s.ravel(), sends, [0.0]])
    durations = of_kinds[graph.kinds]
    durations[graph.firsts] += once_s
    first, second, times = graph.first.tolist(), graph.second.tolist(), durations.tolist()
    ends: list[float] = [0.0]
    add = ends.append

    def run(begin: int, end: int, later: int) -> None:
        """Run the nodes of a range, `later` nodes later in the list."""
        for one, two, time in zip(first[begin:end], second[begin:end], times[begin:end], strict=True):
            a, b = ends[one + later], ends[two + later]
            add((a if a >= b else b) + time)

    place, length, _ = window
    run(1, place, 0)
    done, repeat_s = 0, None
    while done < more and (repeat_s := _repeat_s(ends, window)) is None:
        for _ in range(min(more - done, 1 + _BATCH // length)):
            done += 1
            run(place - length, place, done * length)
    run(place, len(first), done * length)
    longer = put_in(graph, window, done)
    if done:
        durations = of_kinds[longer.kinds]
        durations[longer.firsts] += once_s
    return _Run(longer, np.array(ends), durations, place + done * length, length, more - done, repeat_s or 0.0)


def _repeat_s(ends: Sequence[float], window: Window) -> float | None:
    """The time of a period, if all nodes that later ones wait for ended as long after those a period before them."""
    _, length, reach = window
    tail = np.array(ends[-length - reach :])
    delays = tail[length:] - tail[:-length]
    return float(delays[-1]) if np.abs(delays - delays[-1]).max() <= _CLOSE * tail[-1] else None


def _update_starts(run: _Run, clips_norm: bool) -> Floats:
    """By rank, when its update begins."""
    return np.full_like(run.rank_ends, run.rank_ends.max()) if clips_norm else run.rank_ends


def _times(run: _Run, updates: Floats, *, clips_norm: bool) -> PipelineTimes:
    """The step and where it goes on each rank, the last period repeated."""
    graph, counts = run.graph, np.ones(len(run.ends))
    counts[run.place - run.length : run.place] += run.repeats
    slots, ranks = graph.slots, len(graph.lasts)
    compute = np.bincount(graph.slot_ranks, run.durations[slots] * counts[slots], ranks) + updates
    exposed = np.bincount(graph.slot_ranks, _exposed(run) * counts[slots], ranks)
    total = float((_update_starts(run, clips_norm) + updates).max())
    bubble = np.maximum(0.0, total - compute - exposed)
    rows = zip(compute.tolist(), exposed.tolist(), bubble.tolist(), strict=True)
    return PipelineTimes(total, tuple(RankTimes(*row) for row in rows), len(run.ends))


def _exposed(run: _Run) -> Floats:
    """By slot, how long its rank waits while a transfer to it, or one of its own that it waits for, is under way.

    The length of the union of the transfers' intervals from the end of the slot before on.
    """
    graph, ends = run.graph, run.ends
    begins, finishes = ends[graph.begins], ends[graph.waits]
    is_send = graph.waits != graph.begins[:, None]
    starts = finishes - np.where(is_send, run.durations[graph.waits], 0.0)
    order = np.argsort(starts, axis=1)
    starts, finishes = (np.take_along_axis(table, order, axis=1) for table in (starts, finishes))
    total = np.zeros(len(begins))
    for start, finish in zip(starts.T, finishes.T, strict=True):
        total += np.maximum(0.0, finish - np.maximum(start, begins))
        begins = np.maximum(begins, finish)
    return total


def _timeline(
    run: _Run, owners: Sequence[int], transfers: Sequence[Transfer], updates: Floats, clips_norm: bool
) -> Timeline:
    """All that ran: a process for each rank; transfers are streams of their sender."""
    graph, begins = run.graph, run.ends - run.durations
    spans: list[Span] = []
    for slot, (stage, kind, index) in zip(graph.slots.tolist(), graph.actions.tolist(), strict=True):
        action = str(Action(stage, ActionKind(kind), index))
        spans.append(Span(action, COMPUTE, float(begins[slot]), float(run.ends[slot]), owners[stage]))
    for node, number, index in graph.sent.tolist():
        item = transfers[number]
        name = f"{item.maker}{'F' if item.is_forward else 'B'}{index} {item.name}"
        stream = f"to rank {owners[item.reader]}"
        spans.append(Span(name, stream, float(begins[node]), float(run.ends[node]), owners[item.maker]))
    for rank, (start, update) in enumerate(
        zip(_update_starts(run, clips_norm).tolist(), updates.tolist(), strict=True)
    ):
        if update > 0:
            spans.append(Span("update", COMPUTE, start, start + update, rank))
    return Timeline(tuple(spans), tuple(f"pipeline rank {rank}" for rank in range(len(graph.lasts))))
