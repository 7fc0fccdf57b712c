"""Memory rows: bytes in use at one point of a program as a function of the choice, from what lies in memory there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from passes.memory.memory_usage import MemoryUsage, UsedBytes
from passes.solver.assignment import Floats, MemoryRow

_MOST_KEPT = 32
"""Rows that are kept of one problem: searches of known recipes, and of all plans, ask for the same few."""


def row_at(usage: MemoryUsage, point: int, edge_between: Mapping[tuple[int, ...], int]) -> MemoryRow:
    """The memory row of a program point; `edge_between` gives the edges of pairs of variables."""
    if point not in usage.known_rows:
        if len(usage.known_rows) >= _MOST_KEPT:
            usage.known_rows.clear()
        usage.known_rows[point] = _row_of(usage.items_at(point), edge_between)
    return usage.known_rows[point]


def _row_of(items: Iterable[UsedBytes], edge_between: Mapping[tuple[int, ...], int]) -> MemoryRow:
    """The memory row of items that are in memory at once; `edge_between` as in `row_at`."""
    items = list(items)
    variables: dict[int, list[UsedBytes]] = defaultdict(list)
    edges: dict[int, list[UsedBytes]] = defaultdict(list)
    for item in items:
        if item.is_of_one:
            variables[item.variables[0]].append(item)
        else:
            edges[edge_between[item.variables]].append(item)
    of_one, of_two = dict(variables), dict(edges)
    so_far = MemoryRow(0.0, _Bytes(of_one, finds=False), _Bytes(of_two, finds=False))

    def find(masks: Sequence[NDArray[np.bool_]]) -> None:
        for item in items:
            item.find_among(masks)

    return MemoryRow(0.0, _Bytes(of_one), _Bytes(of_two), so_far, find)


@dataclass(frozen=True, slots=True)
class _Bytes(Mapping[int, Floats]):
    """Bytes by option of variables, or by pair of options of edges, summed when they are asked for.

    Args:
        held: what lies in memory, by the variable or edge that decides about it.
        finds: whether entries that are not known are found; else they are nothing as long as no choice needed them.
    """

    held: Mapping[int, Sequence[UsedBytes]]
    finds: bool = True
    _sums: dict[int, Floats] = field(default_factory=dict, repr=False)

    def __getitem__(self, number: int) -> Floats:
        if number in self._sums:
            return self._sums[number]
        items = self.held[number]
        first, *others = (item.number * item.sizes(finds=self.finds) for item in items)
        total = sum(others, first)
        if all(item.table.is_known for item in items):
            self._sums[number] = total
        return total

    def __iter__(self) -> Iterator[int]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)
