"""Memory rows: bytes in use at one point of a program as a function of the choice, from the items in memory there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from passes.memory.memory_usage import MemoryUsage, UsedBytes
from passes.solver.assignment import Floats, MemoryRow

_MOST_KEPT = 32
"""Most cached rows of one problem; searches of known recipes and of all plans use the same few rows."""


def row_at(usage: MemoryUsage, point: int, edge_between: Mapping[tuple[int, ...], int]) -> MemoryRow:
    """The memory row of a program point; `edge_between` gives the edges of pairs of variables."""
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
    """Bytes by option of variables, or by pair of options of edges, summed on demand.

    Args:
        held: the items in memory, by their deciding variable or edge.
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
