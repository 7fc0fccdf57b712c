"""Compute the bytes in use at every program point under a choice of strategies, fast enough for a search.

An item takes memory over an interval of points, and the options of one or two variables select its size from a table.
The tables of all items lie in one array, so that one lookup gives all sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from passes.memory.liveness import Interval, Liveness
from passes.solver.assignment import Floats, MemoryRow

_Integers = NDArray[np.int64]
_Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class UsedBytes:
    """An item in memory: a tensor or workspace, which counts `number` times.

    Args:
        interval: the points at which the item is in memory.
        table: bytes for each option of one variable, [options], or for each pair of options, [options, options].
        variables: indices of the one or two variables that decide the size.
    """

    interval: Interval
    table: Floats
    variables: tuple[int, ...]
    number: int = 1

    @property
    def is_of_one(self) -> bool:
        """Whether a single variable decides the size, possibly as both row and column of the table."""
        return self.table.ndim == 1 or self.variables[0] == self.variables[-1]

    @property
    def sizes(self) -> Floats:
        """Bytes on each rank of one such item, for each option of the variables (`number` is not multiplied in).

        The shape is [options] if `is_of_one`. Otherwise the rows are the options of the first of `variables`, and the
        columns are the options of the second.
        """
        return np.diagonal(self.table) if self.is_of_one and self.table.ndim == 2 else self.table

    def least(self, masks: Mapping[int, _Mask]) -> float:
        """Return the least bytes of one item over the allowed options.

        `masks` maps a variable to a boolean array [options] of its allowed options. Without a mask, all options are
        allowed.
        """
        sizes = self.sizes
        for axis, variable in enumerate(self.variables[: sizes.ndim]):
            sizes = sizes.compress(masks[variable], axis) if variable in masks else sizes
        return float(sizes.min())


def with_standing(items: Iterable[tuple[str, UsedBytes]], liveness: Liveness) -> Iterator[UsedBytes]:
    """Yield all items, each followed by an item for the copies that other stages and micro-batches of the rank hold.

    These copies are in memory at every point (`Liveness.standing`). `items` are pairs with the site of the item's
    value, or with "" for an item that is not a site's value.
    """
    for name, item in items:
        yield item
        if more := liveness.standing(item.interval, name):
            always = Interval(0, liveness.points - 1)
            yield UsedBytes(always, item.table, item.variables, item.number * more)


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """All items of a program, as arrays; a call with a choice returns the bytes at each point.

    Args:
        births: the first point at which each item is in memory, [items].
        ends: the first point at which each item is no longer in memory, [items].
        sizes: the entries of all tables, one table after another.
        first: the index in `sizes` at which each item's table begins, [items].
        rows, columns: the variables whose options select the table's row and column, [items].
        row_steps, column_steps: the distance in `sizes` between neighbouring options, [items].
        numbers: how many equal items are in memory, [items].
        known_rows: cached memory rows, by program point.
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
    numbers: _Integers
    items: tuple[UsedBytes, ...]
    known_rows: dict[int, MemoryRow] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, points: int, items: Sequence[UsedBytes]) -> MemoryUsage:
        """Return the usage of `items` at the program points 0 to `points` - 1.

        Items with the same table share its entries.
        """
        tables = {id(item.table): item.table for item in items}
        ends = np.cumsum([table.size for table in tables.values()], dtype=np.int64)
        first = dict(zip(tables, [0, *ends.tolist()], strict=False))
        return cls(
            points=points,
            births=_integers([item.interval.birth for item in items]),
            ends=_integers([item.interval.death + 1 for item in items]),
            sizes=np.concatenate([np.zeros(0), *(table.reshape(-1) for table in tables.values())]),
            first=_integers([first[id(item.table)] for item in items]),
            rows=_integers([item.variables[0] for item in items]),
            columns=_integers([item.variables[-1] for item in items]),
            row_steps=_integers([item.table.shape[1] if item.table.ndim == 2 else 1 for item in items]),
            column_steps=_integers([item.table.ndim - 1 for item in items]),
            numbers=_integers([item.number for item in items]),
            items=tuple(items),
        )

    def __call__(self, choice: Sequence[int]) -> Floats:
        """Return the bytes in use on each rank at each point under a choice, [points]."""
        options = np.asarray(choice, dtype=np.int64)
        if not len(self.first):
            return np.zeros(self.points)
        places = self.first + options[self.rows] * self.row_steps + options[self.columns] * self.column_steps
        return self._in_use(self.sizes[places])

    def items_at(self, point: int) -> list[UsedBytes]:
        """Return the items that are in memory at a program point."""
        places = np.flatnonzero((self.births <= point) & (point < self.ends))
        return [self.items[place] for place in places.tolist()]

    def least_peak(self, allowed: Mapping[int, _Mask]) -> float:
        """Return a lower bound of the peak of every allowed choice, in bytes.

        `allowed` is as `masks` in `UsedBytes.least`. The bound is the peak if each item had its least size.
        """
        known: dict[tuple[int, ...], float] = {}
        sizes = np.zeros(len(self.items))
        for place, item in enumerate(self.items):
            key = (id(item.table), item.is_of_one, *(each if each in allowed else -1 for each in item.variables))
            if key not in known:
                known[key] = item.least(allowed)
            sizes[place] = known[key]
        return float(self._in_use(sizes).max(initial=0.0))

    def _in_use(self, sizes: Floats) -> Floats:
        sizes = sizes * self.numbers
        count = self.points + 1
        change = np.bincount(self.births, sizes, count) - np.bincount(self.ends, sizes, count)
        return np.asarray(np.cumsum(change)[:-1], dtype=np.float64)


def _integers(values: Sequence[int]) -> _Integers:
    return np.array(values, dtype=np.int64)
