"""A pipeline schedule as a graph, built once for a shape: which node waits for which, whatever the stages take.

Each pipeline rank stands for all ranks at its place. An action starts when its rank is free and its inputs are there:

    F(s, i)           after F(s - 1, i), sent here if that stage sits on another rank
    B or I(s, i)      after F(s, i) and after B or I(s + 1, i), sent here likewise
    W(s, i)           after I(s, i)

Transfers run on streams of their own, one per ordered pair of ranks. The runtime overlaps transfers with computation,
or it does not: torch's 1F1B (as Megatron's) then swaps, between a forward and a backward, what it has made for what it
needs next, and both neighbours wait for the swap. Other schedules without overlap wait for each of their sends.

A node is a slot that a rank runs, a transfer, a join that takes no time, or the gathering of a stage's parameters. A
node starts when the two nodes ended that it waits for (often one, named twice):

    end(i) = max(end(first(i)), end(second(i))) + duration(kind(i))

1. Nodes and what they wait for are tables, made a column at a time.
2. Slots are then put in the order in which rank 0 asks for them: before each of its slots all slots, of any rank, that
   it needs. Where the schedule repeats itself, so does the list.
3. Transfers and joins stand right behind the last slot that they wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.schedule_orders import SCHEDULES, ActionKind, Rows, last_forward_stage, order_rows, stage_ranks

SEND = len(ActionKind)
KINDS = SEND + 1
"""Kinds of nodes per stage: stage * KINDS + its ActionKind, or + SEND for transfers to its next stage or back from
there. After those of all stages come joins, and then pairs: forward's stage * stages + backward's more."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScheduleGraph:
    """What waits for what.

    Args:
        ranks: how many there are.
        owners: by stage, its rank.
        first, second: for each node the two that it waits for, both earlier. Node 0 is the start of the step, nodes 1
            to `stages` gather the parameters of a stage; they wait for nothing.
        kinds: what each node takes (see KINDS).
        slots: nodes that are slots, rank by rank in order; likewise `slot_ranks`, `begins` (the slot before on that
            rank, or node 0), and `transfers` [slots, 2 or 4], what else it waits for (`begins` where nothing).
        gathers: [stages, 2] by stage, the join of what else its first forward waits for, and the slot of that forward.
        lasts: by stage, the slot with its last backward.
        marks: by micro-batch, the forwards of rank 0 that go on until the steady state ends.
    """

    ranks: int
    owners: Integers
    first: Integers
    second: Integers
    kinds: Integers
    slots: Integers
    slot_ranks: Integers
    begins: Integers
    transfers: Integers
    gathers: Integers
    lasts: Integers
    marks: Integers

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.owners)


@lru_cache(maxsize=128)
def schedule_graph(
    schedule: str,
    ranks: int,
    micro_batches: int,
    virtual_stages: int = 1,
    *,
    overlap_sends: bool = True,
    overlap_pairs: bool = False,
) -> ScheduleGraph:
    """The graph of a schedule; see `schedules.Pipeline` for the arguments.

    Raises:
        CostArgumentError: numbers that the schedule does not admit.

    Example:
        >>> graph = schedule_graph("GPipe", 1, 2)
        >>> graph.first[2:].tolist(), graph.second[2:].tolist()  # a join; two forwards, the first after the gathering
        ([0, 2, 3, 4, 5], [0, 1, 3, 4, 5])
    """
    owners = np.array(stage_ranks(schedule, ranks, virtual_stages))
    orders = order_rows(schedule, ranks, micro_batches, virtual_stages)
    actions = _Actions.of(orders, owners, micro_batches, overlap_pairs)
    waits = _connect(actions, owners, overlap_sends, swaps=SCHEDULES[schedule].swaps and not overlap_sends)
    nodes = np.concatenate([np.zeros((len(owners) + 1, 3), dtype=np.int64), waits.slots, *waits.others])
    nodes[: len(owners) + 1, 2] = KINDS * len(owners)
    order = _order(waits, nodes, actions)
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    is_forward = actions.kinds == ActionKind.FORWARD
    is_done = (actions.kinds == ActionKind.BACKWARD) | (actions.kinds == ActionKind.BACKWARD_WEIGHT)
    lasts = np.zeros(len(owners), dtype=np.int64)
    np.maximum.at(lasts, actions.stages[is_done], actions.slots[is_done])
    marked = is_forward & (actions.stages == last_forward_stage(schedule, ranks, virtual_stages))
    return ScheduleGraph(
        ranks=ranks,
        owners=owners,
        first=places[nodes[order, 0]],
        second=places[nodes[order, 1]],
        kinds=nodes[order, 2],
        slots=places[actions.slot_nodes],
        slot_ranks=actions.slot_ranks,
        begins=places[actions.begins],
        transfers=places[waits.transfers],
        gathers=places[waits.gathers],
        lasts=places[lasts],
        marks=places[actions.slots[marked]],
    )


@dataclass(frozen=True, slots=True)
class _Actions:
    """All actions, rank by rank in order, and the slots that they are in.

    A value is what a stage's forward (2 * stage + 1) or backward (2 * stage) makes of a micro-batch, as one number.

    Args:
        stages, kinds, slots, made, needed, targets: of each action; its slot is a node, `made` and `needed` are values
            or -1, the target is the stage that needs what it makes, or -1.
        is_start: of each action, whether it is the first forward of its stage.
        slot_nodes, slot_ranks, begins: of each slot; `begins` is the slot before on that rank, or node 0.
        heads, tails: of each slot, its first action, and its second or -1.
    """

    stages: Integers
    kinds: Integers
    slots: Integers
    made: Integers
    needed: Integers
    targets: Integers
    is_start: NDArray[np.bool_]
    slot_nodes: Integers
    slot_ranks: Integers
    begins: Integers
    heads: Integers
    tails: Integers

    @classmethod
    def of(cls, orders: Sequence[Rows], owners: Integers, micro_batches: int, pairs: bool) -> _Actions:
        """The tables of the orders; without pairs, each action is a slot of its own."""
        stages, kinds, indices, joined = np.concatenate([rows.T for rows in orders], axis=1)
        is_forward, is_weight = kinds == ActionKind.FORWARD, kinds == ActionKind.BACKWARD_WEIGHT
        step = np.where(is_forward, 1, -1)
        targets, sources = (_within(stages + way * step, len(owners), ~is_weight) for way in (1, -1))
        is_head = joined == 0 if pairs else np.ones_like(joined, dtype=np.bool_)
        (heads,) = np.nonzero(is_head)
        widths = np.diff(heads, append=len(stages))
        slot_nodes = len(owners) + 1 + np.arange(len(heads))
        slot_ranks = owners[stages[heads]]
        return cls(
            stages=stages,
            kinds=kinds,
            slots=np.repeat(slot_nodes, widths),
            made=np.where(is_weight, -1, (2 * stages + is_forward) * micro_batches + indices),
            needed=np.where(sources < 0, -1, (2 * sources + is_forward) * micro_batches + indices),
            targets=targets,
            is_start=is_forward & (indices == 0),
            slot_nodes=slot_nodes,
            slot_ranks=slot_ranks,
            begins=np.where(np.diff(slot_ranks, prepend=-1) != 0, 0, slot_nodes - 1),
            heads=heads,
            tails=np.where(widths == 2, heads + 1, -1),
        )

    def by_slot(self, column: Integers) -> Integers:
        """[slots, 1 or 2] of what a column has for the actions of each slot, -1 for none."""
        columns = [column[self.heads]]
        if (self.tails >= 0).any():
            columns.append(np.where(self.tails < 0, -1, column[self.tails]))
        return np.stack(columns, axis=1)


def _within(stages: Integers, count: int, holds: NDArray[np.bool_]) -> Integers:
    """Numbers of stages, -1 where there is no such stage or the condition does not hold."""
    return np.where(holds & (stages >= 0) & (stages < count), stages, -1)


@dataclass(frozen=True, slots=True)
class _Waits:
    """What waits for what. Nodes are rows of (first, second, kind); they are numbered in the order of the fields, after
    the start and the gathers.

    Args:
        slots: the slots.
        others: transfers, and then, one table after the other, joins that wait for what is before them.
        transfers: see `ScheduleGraph`.
        gathers: likewise.
    """

    slots: Integers
    others: tuple[Integers, ...]
    transfers: Integers
    gathers: Integers


def _connect(actions: _Actions, owners: Integers, overlap_sends: bool, swaps: bool) -> _Waits:
    stages = len(owners)
    sends, sent, arrived = _send(actions, owners, swaps)
    inputs = actions.by_slot(np.where(actions.needed < 0, -1, arrived[actions.needed]))
    owed = np.full_like(inputs, -1)
    if not overlap_sends:
        owed[1:] = actions.by_slot(sent)[:-1]
        kinds = actions.kinds[actions.heads]
        owed[(actions.begins == 0) | (swaps & (np.diff(kinds, prepend=-1) == 0))] = -1
    begins = actions.begins[:, None]
    waited = np.hstack([inputs, owed])
    owed = np.where(owed < 0, begins, owed)
    inputs = np.where(inputs < 0, owed[:, :1], inputs)
    joins = _Joins(stages + 1 + len(begins) + len(sends), KINDS * stages, [])
    slots = np.stack([joins.of(owed), joins.of(inputs), _slot_kinds(actions, stages)], axis=1)
    (starts,) = np.nonzero(actions.is_start[actions.heads])
    started = actions.stages[actions.heads[starts]]
    gathers = np.empty((stages, 2), dtype=np.int64)
    gathers[started, 0] = joins.of(slots[starts, :2], always=True)
    gathers[started, 1] = actions.slot_nodes[starts]
    slots[starts, :2] = np.stack([gathers[started, 0], started + 1], axis=1)
    return _Waits(
        slots=slots,
        others=(sends, *joins.nodes),
        transfers=np.where(waited < 0, begins, waited),
        gathers=gathers,
    )


def _send(actions: _Actions, owners: Integers, swaps: bool) -> tuple[Integers, Integers, Integers]:
    """(transfers as nodes; by action, the transfer of what it makes, or -1; by value, the node that brings it).

    A transfer waits for the one before it on its link, or, where ranks swap, for its reader to be free.
    """
    ranks = owners[actions.stages]
    (senders,) = np.nonzero((actions.targets >= 0) & (owners[actions.targets] != ranks))
    made, targets = actions.made[senders], actions.targets[senders]
    numbers = len(owners) + 1 + len(actions.slot_nodes) + np.arange(len(senders))
    after = actions.slots[senders]
    if swaps:
        reader = np.zeros(actions.made.max() + 2, dtype=np.int64)  # the last for those that need nothing
        reader[actions.needed] = actions.begins[actions.slots - actions.slot_nodes[0]]
        after = reader[made]
    else:
        links = ranks[senders] * len(owners) + owners[targets]
        grouped = np.argsort(links, kind="stable")
        follows = np.diff(links[grouped], prepend=-1) == 0
        after[grouped[follows]] = numbers[grouped[:-1][follows[1:]]]
    kinds = np.minimum(actions.stages[senders], targets) * KINDS + SEND
    sent = np.full(len(actions.stages), -1)
    sent[senders] = numbers
    arrived = np.full(actions.made.max() + 2, -1)  # the last for those that make nothing
    arrived[actions.made] = np.where(sent < 0, actions.slots, sent)
    return np.stack([actions.slots[senders], after, kinds], axis=1), sent, arrived


def _slot_kinds(actions: _Actions, stages: int) -> Integers:
    heads, tails = actions.heads, actions.tails
    alone = actions.stages[heads] * KINDS + actions.kinds[heads]
    pairs = KINDS * stages + 1 + actions.stages[heads] * stages + actions.stages[tails]
    return np.where(tails < 0, alone, pairs)


@dataclass(frozen=True, slots=True)
class _Joins:
    """Joins of two nodes, numbered from `start`."""

    start: int
    kind: int
    nodes: list[Integers]

    def of(self, ends: Integers, always: bool = False) -> Integers:
        """What ends with the last of the one or two nodes of each row: a join where they differ, or always."""
        (rows,) = np.nonzero((ends[:, 0] != ends[:, -1]) | always)
        start = self.start + sum(len(nodes) for nodes in self.nodes)
        self.nodes.append(np.hstack([ends[rows][:, [0, -1]], np.full((len(rows), 1), self.kind)]))
        result = ends[:, 0].copy()
        result[rows] = start + np.arange(len(rows))
        return result


def _order(waits: _Waits, nodes: Integers, actions: _Actions) -> Integers:
    """All nodes, each after the two that it waits for; see the module's docstring."""
    slots = np.zeros(len(nodes), dtype=np.int64)  # of a node that is a slot, its number from 1 on
    slots[actions.slot_nodes] = np.arange(1, len(actions.slot_nodes) + 1)
    keys = np.zeros(len(nodes), dtype=np.int64)
    order = _slot_order(_needed_slots(waits, nodes, slots, actions))
    keys[actions.slot_nodes[order]] = np.arange(1, len(order) + 1)
    end = len(nodes) - sum(len(table) for table in waits.others)
    for table in waits.others:
        start, end = end, end + len(table)
        keys[start:end] = keys[table[:, :2]].max(axis=1)  # a transfer before on its link is of no later slot
    return np.argsort(keys, kind="stable")


def _needed_slots(waits: _Waits, nodes: Integers, slots: Integers, actions: _Actions) -> list[tuple[int, ...]]:
    """By slot, the slots that it waits for, itself or its transfers, each once, numbered from 1 on; 0 for none."""
    columns = [slots[actions.begins]]
    for transfer in waits.transfers.T:
        is_slot = slots[transfer] > 0
        for needed in (np.where(is_slot, transfer, nodes[transfer, 0]), np.where(is_slot, 0, nodes[transfer, 1])):
            column = slots[needed]
            for other in columns:
                column[column == other] = 0
            columns.append(column)
    used = [column.tolist() for column in columns if column.any()]
    return [(), *zip(*used, strict=True)]


def _slot_order(needs: Sequence[Sequence[int]]) -> list[int]:
    """All slots, from 0 on: in turn (those of rank 0 come first), but each after those that it needs."""
    seen = [True] + [False] * (len(needs) - 1)
    order, waiting = list[int](), list[int]()
    add, wait, resume = order.append, waiting.append, waiting.pop
    for root in range(1, len(needs)):
        node = root
        if seen[node]:
            continue
        wait(0)
        while node:
            for need in needs[node]:
                if not seen[need]:
                    wait(node)
                    node = need
                    break
            else:
                seen[node] = True
                add(node - 1)
                node = resume()
    return order


class Window(NamedTuple):
    """Where periods can be put into a graph: before node `place`, each like the `length` nodes before it.

    No node after `place` - `length` waits for one more than `reach` before it; and for as many nodes before
    `place` - `length`, kinds and what they wait for are those of the nodes `length` later.
    """

    place: int
    length: int
    reach: int


def steady_window(graph: ScheduleGraph, step: int) -> Window | None:
    """The end of a schedule's steady state, if it has one that is long enough.

    Args:
        graph: of a schedule.
        step: micro-batches of a period (`schedule_orders.repeating_micro_batches`).
    """
    if len(graph.marks) <= step:
        return None
    place = int(graph.marks[-1])
    length = place - int(graph.marks[-1 - step])
    waits = np.arange(place - length, len(graph.first)) - np.minimum(graph.first, graph.second)[place - length :]
    reach = int(waits.max())
    begin = place - length - reach
    if begin < 0 or graph.lasts.min() < place or graph.gathers.max() >= begin:
        return None
    before, after = slice(begin, place - length), slice(begin + length, place)
    repeats = all(
        np.array_equal(column[before] + shift, column[after])
        for column, shift in ((graph.kinds, 0), (graph.first, length), (graph.second, length))
    )
    return Window(place, length, reach) if repeats else None


def put_in(graph: ScheduleGraph, window: Window, periods: int) -> ScheduleGraph:
    """The graph with periods put in: that of as many more micro-batches, but for `marks`.

    Slots come in another order.
    """
    if periods == 0:
        return graph
    place, length, _ = window
    numbers = np.arange(len(graph.first))
    period, rest = numbers[place - length : place], numbers[place:]
    rows = np.concatenate([numbers[:place], np.tile(period, periods), rest])
    shifts = np.repeat(
        np.r_[0, length * np.arange(1, periods + 1), length * periods], [place, *[length] * periods, len(rest)]
    )
    of_slots = np.full(len(numbers), -1)
    of_slots[graph.slots] = np.arange(len(graph.slots))
    slots = of_slots[rows]
    later, slots = shifts[slots >= 0], slots[slots >= 0]
    return replace(
        graph,
        first=graph.first[rows] + shifts,
        second=graph.second[rows] + shifts,
        kinds=graph.kinds[rows],
        slots=graph.slots[slots] + later,
        slot_ranks=graph.slot_ranks[slots],
        begins=graph.begins[slots] + later,
        transfers=graph.transfers[slots] + later[:, None],
        lasts=graph.lasts + length * periods,
    )
