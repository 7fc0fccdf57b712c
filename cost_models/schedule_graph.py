"""The order of a pipeline's step as a graph: which node waits for which, whatever the stages take.

Each pipeline rank stands for all ranks at its place. An action starts when its rank is free and its inputs are there:

    F(s, i)           after F(r, i) of each stage r that makes a value for it, sent here if r sits on another rank
    B or I(s, i)      after F(s, i) and after B or I(r, i), sent here likewise
    W(s, i)           after I(s, i)

Transfers run on streams of their own, one per ordered pair of ranks. The runtime overlaps transfers with computation,
or it does not: torch's 1F1B (as Megatron's) then swaps, between a forward and a backward, what it has made for what it
needs next, and both neighbours wait for the swap. Other schedules without overlap wait for each of their sends.

A node is an action, a transfer, or a join that takes no time. A node starts when the two nodes ended that it waits for
(often one, named twice):

    end(i) = max(end(first(i)), end(second(i))) + duration(kind(i))

1. Nodes and what they wait for are tables, made a column at a time.
2. Actions are then put in the order in which rank 0 asks for them: before each of its actions all actions, of any rank,
   that it needs. Where the schedule repeats itself, so does the list.
3. Transfers and joins stand right behind the last action that they wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.schedule_orders import SCHEDULES, ActionKind, Rows, order_rows, stage_ranks

Integers = NDArray[np.int64]


class Transfer(NamedTuple):
    """A value that a stage's forward, or its backward, makes for another stage's, of each micro-batch."""

    name: str
    maker: int
    reader: int
    is_forward: bool


@dataclass(frozen=True, slots=True)
class OrderGraph:
    """What waits for what.

    Args:
        first, second: for each node the two that it waits for, both earlier. Node 0 is the start of the step.
        kinds: what each node takes: of an action, len(ActionKind) * stage + its kind; then come the numbers of
            transfers, and that of joins.
        slots: the actions' nodes, rank by rank in order; likewise `slot_ranks`, `begins` (the slot before on that rank,
            or node 0), and `waits` [slots, n], the transfers that it waits for (`begins` where nothing).
        firsts: by stage, the slot of its first forward.
        lasts: by rank, its last slot.
        actions: [slots, 3] with stage, kind and micro-batch.
        sent: [n, 3] with the node, the number and the micro-batch of each transfer between ranks.
    """

    first: Integers
    second: Integers
    kinds: Integers
    slots: Integers
    slot_ranks: Integers
    begins: Integers
    waits: Integers
    firsts: Integers
    lasts: Integers
    actions: Integers
    sent: Integers


@lru_cache(maxsize=128)
def schedule_graph(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int = 1, *, overlap_sends: bool = True
) -> OrderGraph:
    """The graph of a schedule whose stages hand on to their neighbours; see `stages.Pipeline` for the arguments.

    Raises:
        CostArgumentError: numbers that the schedule does not admit.

    Example:
        >>> graph = schedule_graph("GPipe", 1, 2)
        >>> graph.first.tolist(), graph.kinds.tolist()  # the start, two forwards, two backwards
        ([0, 0, 1, 2, 3], [4, 0, 0, 1, 1])
    """
    orders = order_rows(schedule, ranks, micro_batches, virtual_stages)
    owners = stage_ranks(schedule, ranks, virtual_stages)
    swaps = SCHEDULES[schedule].swaps and not overlap_sends
    return order_graph(orders, owners, neighbours(len(owners)), overlap_sends=overlap_sends, swaps=swaps)


def neighbours(stages: int) -> tuple[Transfer, ...]:
    """Each stage's output to the next stage, and its gradient back."""
    pairs = tuple(pairwise(range(stages)))
    forwards = (Transfer("", early, late, True) for early, late in pairs)
    return (*forwards, *(Transfer("", late, early, False) for early, late in pairs))


def order_graph(
    orders: Sequence[Rows],
    owners: Sequence[int],
    transfers: Sequence[Transfer],
    *,
    overlap_sends: bool = True,
    swaps: bool = False,
) -> OrderGraph:
    """The graph of an order.

    Args:
        orders: by rank, its actions; they can run to their end.
        owners: by stage, its rank.
        transfers: values that stages make for each other.
        overlap_sends: whether transfers overlap with compute.
        swaps: whether neighbours swap, both waiting, if not.
    """
    actions = np.concatenate(orders)[:, :3]
    ranks, count = np.array(owners)[actions[:, 0]], len(actions)
    slots = np.arange(1, count + 1)
    begins = np.where(np.diff(ranks, prepend=-1) != 0, 0, slots - 1)
    places = _places(actions, slots, len(owners))
    makers, readers, numbers, indices = _moved(places, transfers, owners)
    sent = count + 1 + np.arange(len(makers))
    after = begins[readers - 1] if swaps else _before_on_link(makers, readers, sent, ranks)
    inputs, owed = _by_slot(readers, sent, count), np.full((count, 0), -1)
    if not overlap_sends:
        owed = np.roll(_by_slot(makers, sent, count), 1, axis=0)
        owed[(begins == 0) | (swaps & (np.diff(actions[:, 1], prepend=-1) == 0))] = -1
    first_of_transfers = len(ActionKind) * len(owners)
    joins = _Joins(count + 1 + len(sent), first_of_transfers + len(transfers), [])
    first = _either(joins.of(owed), begins)
    second = _either(joins.of(inputs), first)
    start, kinds = np.array([[0, 0, joins.kind]]), actions[:, 0] * len(ActionKind) + actions[:, 1]
    ways = np.stack([makers, after, first_of_transfers + numbers], axis=1)
    nodes = np.concatenate([start, np.stack([first, second, kinds], axis=1), ways, *joins.nodes])

    def slots_of(values: Integers, columns: Integers) -> list[Integers]:
        """Columns of transfers' slots, 0 for none."""
        known = np.append(values, 0)
        return [known[np.where(column < 0, len(values), column - count - 1)] for column in columns.T]

    needs = [begins, *slots_of(makers, inputs), *(slots_of(after, owed) if swaps else ())]
    order = _order(nodes, count, _slot_order(_distinct(needs)), [len(sent), *map(len, joins.nodes)])
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return OrderGraph(
        first=place[nodes[order, 0]],
        second=place[nodes[order, 1]],
        kinds=nodes[order, 2],
        slots=place[slots],
        slot_ranks=ranks,
        begins=place[begins],
        waits=place[_either(np.hstack([inputs, owed]), begins[:, None])],
        firsts=place[places[:, 1, 0]],
        lasts=place[slots[np.diff(ranks, append=-1) != 0]],
        actions=actions,
        sent=np.stack([place[sent], numbers, indices], axis=1),
    )


def _either(values: Integers, others: Integers) -> Integers:
    """Values, and others where those are negative."""
    return np.where(values < 0, others, values)


def _places(actions: Integers, slots: Integers, stages: int) -> Integers:
    """The slot of each stage's backward (0) and forward (1) of each micro-batch, [stages, 2, micro-batches], or -1.

    Of a backward that is cut in two, its first half.
    """
    stage, kind, index = actions.T
    found = np.full((stages, 2, index.max() + 1), -1)
    is_main = kind != ActionKind.BACKWARD_WEIGHT
    found[stage[is_main], (kind == ActionKind.FORWARD)[is_main].astype(int), index[is_main]] = slots[is_main]
    return found


def _moved(places: Integers, transfers: Sequence[Transfer], owners: Sequence[int]) -> tuple[Integers, ...]:
    """Transfers between ranks in the order of their making: slots of makers and readers, numbers, micro-batches."""
    rows = [np.empty((4, 0), dtype=np.int64)]
    for number, item in enumerate(transfers):
        maker, reader = (places[stage, int(item.is_forward)] for stage in (item.maker, item.reader))
        if owners[item.maker] != owners[item.reader] and maker[0] >= 0:
            rows.append(np.stack([maker, reader, np.full_like(maker, number), np.arange(len(maker))]))
    table = np.concatenate(rows, axis=1)
    return tuple(table[:, np.argsort(table[0], kind="stable")])


def _before_on_link(makers: Integers, readers: Integers, sent: Integers, ranks: Integers) -> Integers:
    """The transfer before each transfer between the same ranks, or its maker."""
    after, links = makers.copy(), ranks[makers - 1] * (ranks.max() + 1) + ranks[readers - 1]
    grouped = np.argsort(links, kind="stable")
    follows = np.diff(links[grouped], prepend=-1) == 0
    after[grouped[follows]] = sent[grouped[:-1][follows[1:]]]
    return after


def _by_slot(slots: Integers, sent: Integers, count: int) -> Integers:
    """[slots, n] with the transfers of each slot, -1 for none."""
    order = np.argsort(slots, kind="stable")
    slots = slots[order] - 1
    turns = np.arange(len(slots)) - np.searchsorted(slots, slots)
    found = np.full((count, int(turns.max(initial=-1)) + 1), -1)
    found[slots, turns] = sent[order]
    return found


@dataclass(frozen=True, slots=True)
class _Joins:
    """Joins of two nodes, numbered from `start`."""

    start: int
    kind: int
    nodes: list[Integers]

    def of(self, ends: Integers) -> Integers:
        """A node for each row that ends with the last of the row's nodes; -1 for an empty row."""
        result = np.full(len(ends), -1)
        for column in ends.T:
            (rows,) = np.nonzero((result >= 0) & (column >= 0))
            start = self.start + sum(map(len, self.nodes))
            self.nodes.append(np.stack([result[rows], column[rows], np.full(len(rows), self.kind)], axis=1))
            result = _either(result, column)
            result[rows] = start + np.arange(len(rows))
        return result


def _order(nodes: Integers, count: int, order: Sequence[int], tables: Sequence[int]) -> Integers:
    """All nodes, each after the two that it waits for; see the module's docstring."""
    keys = np.zeros(len(nodes), dtype=np.int64)
    keys[np.array(order, dtype=np.int64) + 1] = np.arange(1, count + 1)
    end = count + 1
    for size in tables:
        start, end = end, end + size
        keys[start:end] = keys[nodes[start:end, :2]].max(axis=1)  # a transfer before on its link is of no later slot
    return np.argsort(keys, kind="stable")


def _distinct(columns: Sequence[Integers]) -> list[tuple[int, ...]]:
    """By slot, the slots that it waits for, itself or its transfers, each once, numbered from 1 on; 0 for none."""
    columns = [column.copy() for column in columns]
    for place, column in enumerate(columns):
        for other in columns[:place]:
            column[column == other] = 0
    used = [column.tolist() for place, column in enumerate(columns) if column.any() or place == 0]
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


def steady_window(graph: OrderGraph, stage: int, step: int) -> Window | None:
    """The end of a schedule's steady state, if it has one that is long enough.

    Args:
        graph: of a schedule.
        stage: one of rank 0 whose forwards go on as long (`schedule_orders.last_forward_stage`).
        step: micro-batches of a period (`schedule_orders.repeating_micro_batches`).
    """
    marks = graph.slots[(graph.actions[:, 0] == stage) & (graph.actions[:, 1] == ActionKind.FORWARD)]
    if len(marks) <= step:
        return None
    place = int(marks[-1])
    length = place - int(marks[-1 - step])
    waits = np.arange(place - length, len(graph.first)) - np.minimum(graph.first, graph.second)[place - length :]
    reach = int(waits.max())
    begin = place - length - reach
    if begin < 0 or graph.lasts.min() < place or graph.firsts.max() >= begin:
        return None
    before, after = slice(begin, place - length), slice(begin + length, place)
    repeats = all(
        np.array_equal(column[before] + shift, column[after])
        for column, shift in ((graph.kinds, 0), (graph.first, length), (graph.second, length))
    )
    return Window(place, length, reach) if repeats else None


def put_in(graph: OrderGraph, window: Window, periods: int) -> OrderGraph:
    """The graph with periods put in: that of as many more micro-batches, but for `actions` and `sent`.

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
        waits=graph.waits[slots] + later[:, None],
        lasts=graph.lasts + length * periods,
    )
