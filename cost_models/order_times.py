"""Time of a pipeline's step, from the ordered actions of each rank and the values that stages exchange.

Each pipeline rank represents all ranks at its place in the pipeline. Stage s runs the forward F(s, i) and the backward
B(s, i) of micro-batch i. A backward may be cut into I(s, i), for the stage's input, and W(s, i), for its weights. An
action starts once its rank is free and its inputs have arrived. Let r be any stage whose value the action reads:

* F(s, i) starts after F(r, i);
* B(s, i) or I(s, i) starts after F(s, i), and after B(r, i) or I(r, i);
* W(s, i) starts after I(s, i).

If r is on another rank, a transfer comes in between. Transfers run on streams of their own, one for each ordered pair
of ranks, in the order of their values. Transfers overlap with computation, or each rank waits for its sends.

At any time a rank computes, waits for a transfer under way, or waits for other ranks (the bubble).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.schedule_orders import (
    Action,
    ActionKind,
    Rows,
    order_rows,
    repeating_micro_batches,
    settled_micro_batches,
    stage_ranks,
)
from cost_models.timeline import COMPUTE, Span, Timeline

Floats = NDArray[np.float64]


class Transfer(NamedTuple):
    """A value that one stage (`maker`) sends to another stage (`reader`) in each micro-batch.

    `is_forward` says whether forwards make and read the value; otherwise, backwards do.
    """

    name: str
    maker: int
    reader: int
    is_forward: bool


class StageTimes(NamedTuple):
    """Seconds of a pipeline stage for one micro-batch.

    Args:
        forward_s: forward, including exposed communication inside the stage.
        backward_input_s: the half of the backward that computes the gradient of the stage's input.
        backward_weight_s: the half of the backward that computes gradients of weights. A schedule without split
            backwards runs both halves, one after the other.
        send_s: one transfer of the output to the next stage, or of its gradient back; 0 if both stages share a rank.
        recompute_s: forward work that the backward repeats, before `backward_input_s`.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    send_s: float = 0.0
    recompute_s: float = 0.0

    @property
    def backward_s(self) -> float:
        """Seconds of the whole backward, recomputation included."""
        return self.recompute_s + self.backward_input_s + self.backward_weight_s

    @property
    def actions_s(self) -> tuple[float, float, float, float]:
        """Seconds of each kind of action, in the order of `ActionKind`."""
        return self.forward_s, self.backward_s, self.recompute_s + self.backward_input_s, self.backward_weight_s


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Seconds of computation and waiting on one pipeline rank, which sum to the step; the update is computation.

    `exposed_send_s` is waiting for transfers under way, and `bubble_s` is waiting for other ranks.
    """

    compute_s: float
    exposed_send_s: float
    bubble_s: float


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """The time of a step, and its parts on each pipeline rank, in the order of ranks."""

    total_s: float
    ranks: tuple[RankTimes, ...]


class _Node(NamedTuple):
    """An action or a transfer, with the earlier nodes that it waits for.

    Args:
        kind: a number that says which action or transfer this is. An action has len(ActionKind) * stage + its kind;
            transfers have larger numbers.
        rank: rank of the action, or of the transfer's maker.
        waits: indices of the earlier nodes. For an action, the rank's previous action comes first, if there is one.
    """

    kind: int
    rank: int
    micro_batch: int
    waits: tuple[int, ...]


def neighbours(stages: int) -> tuple[Transfer, ...]:
    """Return the transfers between neighbouring stages: each output to the next stage, and its gradient back."""
    pairs = tuple(pairwise(range(stages)))
    forwards = (Transfer("", early, late, True) for early, late in pairs)
    return (*forwards, *(Transfer("", late, early, False) for early, late in pairs))


def _nodes(
    orders: Sequence[Rows], owners: Sequence[int], transfers: Sequence[Transfer], *, overlap_sends: bool
) -> list[_Node]:
    """Return all actions and transfers of a step as nodes, each after the nodes that it waits for.

    The ranks take turns. In its turn, a rank runs its next actions until an action lacks an input.
    """
    made: dict[tuple[int, bool], list[int]] = {}
    read: dict[tuple[int, bool], list[int]] = {}
    for number, item in enumerate(transfers):
        if owners[item.maker] != owners[item.reader]:
            made.setdefault((item.maker, item.is_forward), []).append(number)
            read.setdefault((item.reader, item.is_forward), []).append(number)
    rows = [order[:, :3].tolist() for order in orders]
    places: list[int] = [0] * len(rows)
    free: list[tuple[int, ...]] = [()] * len(rows)
    nodes: list[_Node] = []
    arrivals: dict[tuple[int, int], int] = {}
    links: dict[tuple[int, int], int] = {}
    sends = len(ActionKind) * len(owners)
    while any(place < len(row) for place, row in zip(places, rows, strict=True)):
        for rank, row in enumerate(rows):
            while places[rank] < len(row):
                stage, kind, index = row[places[rank]]
                value = (stage, kind == ActionKind.FORWARD)
                is_main = kind != ActionKind.BACKWARD_WEIGHT
                inputs = [arrivals.get((number, index), -1) for number in read.get(value, ()) if is_main]
                if -1 in inputs:
                    break
                places[rank] += 1
                action = len(nodes)
                nodes.append(_Node(len(ActionKind) * stage + kind, rank, index, (*free[rank], *inputs)))
                sent: list[int] = []
                for number in made.get(value, ()) if is_main else ():
                    link = (rank, owners[transfers[number].reader])
                    waits = (action, links[link]) if link in links else (action,)
                    links[link] = arrivals[number, index] = len(nodes)
                    sent.append(len(nodes))
                    nodes.append(_Node(sends + number, rank, index, waits))
                free[rank] = (action, *sent) if sent and not overlap_sends else (action,)
    return nodes


def _ends(nodes: Sequence[_Node], durations: Sequence[float]) -> list[float]:
    ends: list[float] = []
    for node, seconds in zip(nodes, durations, strict=True):
        waits = node.waits
        start = max([ends[wait] for wait in waits]) if len(waits) > 1 else ends[waits[0]] if waits else 0.0
        ends.append(start + seconds)
    return ends


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
    """Return the times of a step and its timeline. Transfers overlap with computation.

    Args:
        orders: the actions of each rank, in order; the orders have no deadlock.
        owners: the rank of each stage.
        actions_s: seconds of each kind of action of each stage, [stages, kinds].
        transfers: each value that stages exchange, with its seconds between two ranks.
        once_s: seconds that the first forward of each stage takes beyond those of later forwards, [stages].
        update_s: seconds of each stage's update, after the rank's last action, [stages].
        clips_norm: whether updates wait for the gradients of all ranks.
    """
    items = tuple(transfers)
    nodes = _nodes(orders, owners, items, overlap_sends=True)
    durations = _durations(nodes, actions_s, tuple(transfers.values()), once_s)
    ends = _ends(nodes, durations)
    run = list(zip(nodes, [end - seconds for end, seconds in zip(ends, durations, strict=True)], ends, strict=True))
    updates = np.bincount(owners, update_s, len(orders)).tolist()
    compute, exposed, free = list(updates), [0.0] * len(orders), [0.0] * len(orders)
    spans: list[Span] = []
    for node, start, end in run:
        if (action := _action(node, len(owners))) is None:
            item = items[node.kind - len(ActionKind) * len(owners)]
            name = f"{item.maker}{'F' if item.is_forward else 'B'}{node.micro_batch} {item.name}"
            spans.append(Span(name, f"to rank {owners[item.reader]}", start, end, node.rank))
            continue
        spans.append(Span(str(action), COMPUTE, start, end, node.rank))
        compute[node.rank] += end - start
        sent = [run[wait] for wait in node.waits if _action(nodes[wait], len(owners)) is None]
        exposed[node.rank] += max([0.0, *(arrival - max(free[node.rank], begin) for _, begin, arrival in sent)])
        free[node.rank] = end
    starts = [max(free)] * len(free) if clips_norm else free
    total_s = max(start + update for start, update in zip(starts, updates, strict=True))
    for rank, (start, update) in enumerate(zip(starts, updates, strict=True)):
        if update > 0:
            spans.append(Span("update", COMPUTE, start, start + update, rank))
    parts = [
        RankTimes(busy, waited, max(0.0, total_s - busy - waited))
        for busy, waited in zip(compute, exposed, strict=True)
    ]
    return PipelineTimes(total_s, tuple(parts)), Timeline(
        tuple(spans), tuple(f"pipeline rank {rank}" for rank in range(len(orders)))
    )


def _action(node: _Node, stages: int) -> Action | None:
    stage, kind = divmod(node.kind, len(ActionKind))
    return Action(stage, ActionKind(kind), node.micro_batch) if stage < stages else None


def _durations(nodes: Sequence[_Node], actions_s: Floats, sends_s: Sequence[float], once_s: Floats) -> list[float]:
    """Return the seconds of each node.

    The first forward of stage s takes `once_s[s]` seconds more than its later forwards.
    """
    of_kinds = [*actions_s.ravel().tolist(), *sends_s]
    durations = [of_kinds[node.kind] for node in nodes]
    firsts: dict[int, int] = {}
    for number, node in enumerate(nodes):
        firsts.setdefault(node.kind, number)
    for stage, seconds in enumerate(once_s.tolist()):
        durations[firsts[len(ActionKind) * stage + ActionKind.FORWARD]] += seconds
    return durations


@lru_cache(maxsize=4096)
def schedule_time(
    schedule: str, stages: tuple[StageTimes, ...], micro_batches: int, virtual_stages: int = 1, *, overlap_sends: bool
) -> float:
    """Seconds of a step under a schedule, if stages send to their neighbours only.

    The steady state of a schedule repeats, so only the first of many micro-batches are simulated. On p ranks, each
    remaining micro-batch takes the mean time of the last p simulated ones, and at least the computation of the busiest
    rank. The simulated micro-batches alone would hide a rank that is only a little busier than its neighbours.

    Args:
        schedule: a key of `schedule_orders.SCHEDULES`.
        stages: times of the stages, in the order of the model.
        micro_batches: micro-batches of a step (per data parallel replica).
        virtual_stages: number of stages on each rank.
        overlap_sends: whether transfers overlap with computation; otherwise each rank waits for its sends.

    Raises:
        CostArgumentError: the schedule does not allow these numbers of ranks, micro-batches and stages on each rank.

    Example:
        >>> schedule_time("1F1B", (StageTimes(1.0, 1.0, 1.0),) * 4, 100_000, overlap_sends=True)
        300009.0
    """
    ranks = len(stages) // virtual_stages
    actions_s = np.array([stage.actions_s for stage in stages])
    sends_s = [stages[min(item.maker, item.reader)].send_s for item in neighbours(len(stages))]

    def total_s(count: int) -> float:
        nodes = _schedule_nodes(schedule, ranks, count, virtual_stages, overlap_sends=overlap_sends)
        return max(_ends(nodes, _durations(nodes, actions_s, sends_s, np.zeros(len(stages)))))

    step = repeating_micro_batches(schedule, ranks, micro_batches) or micro_batches
    period = -(-ranks // step) * step
    few = settled_micro_batches(schedule, ranks, micro_batches, virtual_stages) + period
    more = max(0, micro_batches - few) // step * step
    last_s = total_s(micro_batches - more)
    if not more:
        return last_s
    owners = stage_ranks(schedule, ranks, virtual_stages)
    busiest_s = max(np.bincount(owners, [stage.forward_s + stage.backward_s for stage in stages]).tolist())
    return last_s + more * max(busiest_s, (last_s - total_s(micro_batches - more - period)) / period)


@lru_cache(maxsize=128)
def _schedule_nodes(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int, *, overlap_sends: bool
) -> list[_Node]:
    """Return the nodes of a schedule whose stages send to their neighbours only."""
    orders, owners = (
        order_rows(schedule, ranks, micro_batches, virtual_stages),
        stage_ranks(schedule, ranks, virtual_stages),
    )
    return _nodes(orders, owners, neighbours(len(owners)), overlap_sends=overlap_sends)
