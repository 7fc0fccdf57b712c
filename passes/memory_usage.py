"""Bytes in use at every point of a program as a function of the choice, for searches that ask for it often.

What lies in memory is an item: it has a lifetime, and its size is an entry of a table, chosen by the options of one or
two variables. All tables are laid end to end, so that one lookup gives all sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.assignment import Floats
from passes.liveness import Interval

_Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Item:
    """What is in memory over `interval`: `table[choice[row], choice[column]]` bytes; a vector has only rows."""

    interval: Interval
    table: Floats
    row: int
    column: int = 0


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """The items of a program with `points` points; make it with `of`.

    Args:
        births: the point from which each item is in memory, [items].
        ends: the point from which it no longer is, [items].
        sizes: all tables end to end.
        first: where the table of each item begins, [items].
        rows, columns: the variables whose options are looked up, [items].
        row_steps, column_steps: by how many entries one option further is, [items].
    """

    points: int
    births: _Integers
    ends: _Integers
    sizes: Floats
    first: _Integers
    rows: _Integers
    columns: _Integers
    row_steps: _Integers
    column_steps: _Integers

    @classmethod
    def of(cls, points: int, items: Sequence[Item]) -> MemoryUsage:
        """The usage of `items`; those that share a table object share its entries."""
        tables = {id(item.table): item.table for item in items}
        ends = np.cumsum([table.size for table in tables.values()], dtype=np.int64)
        first = dict(zip(tables, [0, *ends.tolist()], strict=False))
        return cls(
            points=points,
            births=_integers([item.interval.birth for item in items]),
            ends=_integers([item.interval.death + 1 for item in items]),
            sizes=np.concatenate([np.zeros(0), *(table.reshape(-1) for table in tables.values())]),
            first=_integers([first[id(item.table)] for item in items]),
            rows=_integers([item.row for item in items]),
            columns=_integers([item.column for item in items]),
            row_steps=_integers([item.table.shape[1] if item.table.ndim == 2 else 1 for item in items]),
            column_steps=_integers([item.table.ndim - 1 for item in items]),
        )

    def __call__(self, choice: Sequence[int]) -> Floats:
        """Bytes in use at each point, [points]."""
        options = np.asarray(choice, dtype=np.int64)
        if not len(self.first):
            return np.zeros(self.points)
        places = self.first + options[self.rows] * self.row_steps + options[self.columns] * self.column_steps
        sizes = self.sizes[places]
        count = self.points + 1
        change = np.bincount(self.births, sizes, count) - np.bincount(self.ends, sizes, count)
        return np.asarray(np.cumsum(change)[:-1], dtype=np.float64)


def _integers(values: Sequence[int]) -> _Integers:
    return np.array(values, dtype=np.int64)
