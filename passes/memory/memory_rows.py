"""Build memory rows: the bytes in use at one program point as a function of the choice, for the solver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from passes.memory.memory_usage import MemoryUsage, UsedBytes
from passes.solver.assignment import Floats, MemoryRow

_MOST_KEPT = 32
"""Most rows in the cache of one `MemoryUsage`. The cache is emptied when full.

Searches of known recipes and of all plans use the same few rows.
"""


def row_at(usage: MemoryUsage, point: int, edge_between: Mapping[tuple[int, ...], int]) -> MemoryRow:
    """Return the memory row of a program point: the bytes in use there as a function of the choice.

    The row is cached in `usage`. `edge_between` gives the index of the edge between two variables. The edge holds the
    items whose size both variables decide.
    """
    if point not in usage.known_rows:
        if len(usage.known_rows) >= _MOST_KEPT:
            usage.known_rows.clear()
        variables: dict[int, list[UsedBytes]] = defaultdict(list)
        edges: dict[int, list[UsedBytes]] = defaultdict(list)
        for item in usage.items_at(point):
            if item.is_of_one:
                variables[item.variables[0]].append(item)
            else:
                edges[edge_between[item.variables]].append(item)
        usage.known_rows[point] = MemoryRow(0.0, _Bytes(dict(variables)), _Bytes(dict(edges)))
    return usage.known_rows[point]


@dataclass(frozen=True, slots=True)
class _Bytes(Mapping[int, Floats]):
    """A mapping from a variable or edge to the bytes of its items in memory, for each of its options.

    `held` has the items. Their bytes are added up when an entry is first read.
    """

    held: Mapping[int, Sequence[UsedBytes]]
    _sums: dict[int, Floats] = field(default_factory=dict, repr=False)

    def __getitem__(self, number: int) -> Floats:
        if number not in self._sums:
            first, *others = (item.number * item.sizes for item in self.held[number])
            self._sums[number] = sum(others, first)
        return self._sums[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)
