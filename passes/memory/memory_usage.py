"""Bytes in use at every point of a program as a function of the choice, for searches that ask for it often.

What lies in memory is an item: it has a lifetime, and its size is an entry of a table, chosen by the options of one or
two variables. All tables are laid end to end, so that one lookup gives all sizes. Entries that are slow to find are
found when a choice first needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from passes.memory.liveness import Interval, Liveness
from passes.solver.assignment import Floats, MemoryRow

_Integers = NDArray[np.int64]
_Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Bytes by the options of one or two variables; those that are not known yet are NaN, and `find` gives them."""

    sizes: Floats
    find: Callable[..., float] | None = None

    @property
    def is_of_one(self) -> bool:
        """Whether one variable decides."""
        return self.sizes.ndim == 1

    def at(self, *options: int) -> float:
        """The entry of some options."""
        if np.isnan(self.sizes[options]):
            assert self.find is not None, "only a table that can find entries leaves them out"
            self.sizes[options] = self.find(*options)
        return float(self.sizes[options])

    @property
    def is_known(self) -> bool:
        """Whether all entries are."""
        return self.find is None or not np.isnan(self.sizes).any()

    def whole(self) -> Floats:
        """All entries, found where they were not known."""
        if self.find is None:
            return self.sizes
        for options in np.argwhere(np.isnan(self.sizes)).tolist():
            self.at(*options)
        return self.sizes

    def so_far(self) -> Floats:
        """All entries, 0 where they are not known."""
        return self.sizes if self.find is None else np.nan_to_num(self.sizes, nan=0.0)

    def find_among(self, masks: Sequence[_Mask], *, is_diagonal: bool) -> None:
        """Find the entries of options that masks leave; `is_diagonal`: one variable decides as row and as column."""
        if self.find is None:
            return
        unknown = np.isnan(self.sizes)
        for axis, mask in enumerate(masks[: unknown.ndim]):
            unknown &= mask if unknown.ndim == 1 else np.expand_dims(mask, 1 - axis)
        for options in np.argwhere(unknown & np.eye(len(unknown), dtype=bool) if is_diagonal else unknown).tolist():
            self.at(*options)

    def least(self, masks: Sequence[_Mask | None], *, is_diagonal: bool) -> float:
        """The least entry of the options that masks leave, all of them for None; 0 if some are not known.

        `is_diagonal`: one variable decides as row and as column.
        """
        sizes = np.diagonal(self.sizes) if is_diagonal else self.sizes
        for axis, mask in enumerate(masks[: sizes.ndim]):
            sizes = sizes if mask is None else sizes.compress(mask, axis)
        least = float(sizes.min())
        return 0.0 if np.isnan(least) else least


@dataclass(frozen=True, slots=True)
class UsedBytes:
    """What is in memory over `interval`: as many bytes as a table says of the options of one or two variables.

    `number`: how many such there are.
    """

    interval: Interval
    table: Table
    variables: tuple[int, ...]
    number: int = 1

    @property
    def is_of_one(self) -> bool:
        """Whether one variable decides, be it as row and as column."""
        return self.table.is_of_one or self.variables[0] == self.variables[-1]

    def find_among(self, masks: Sequence[_Mask]) -> None:
        """Find the sizes under options that masks leave, by variable."""
        of_own = [masks[variable] for variable in self.variables]
        self.table.find_among(of_own, is_diagonal=self.is_of_one and not self.table.is_of_one)

    def sizes(self, *, finds: bool) -> Floats:
        """Bytes of one such by option, or pair of options; `finds`: those that are not known are found, else 0."""
        sizes = self.table.whole() if finds else self.table.so_far()
        return np.diagonal(sizes) if self.is_of_one and not self.table.is_of_one else sizes


def with_standing(items: Iterable[tuple[str, UsedBytes]], liveness: Liveness) -> Iterator[UsedBytes]:
    """Items, and what the rank holds like them at all times; see `Liveness.standing`.

    Args:
        items: each behind the site that it is the value of, "" for others.
        liveness: of the program.
    """
    for name, item in items:
        yield item
        if more := liveness.standing(item.interval, name):
            always = Interval(0, liveness.points - 1)
            yield UsedBytes(always, item.table, item.variables, item.number * more)


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
        numbers: how many there are of each, [items].
        items: what it is made of.
        known_rows: memory rows that were made of it, by point.
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
        """The usage of `items`; those that share a table object share its entries."""
        tables = {id(item.table): item.table.sizes for item in items}
        ends = np.cumsum([sizes.size for sizes in tables.values()], dtype=np.int64)
        first = dict(zip(tables, [0, *ends.tolist()], strict=False))
        return cls(
            points=points,
            births=_integers([item.interval.birth for item in items]),
            ends=_integers([item.interval.death + 1 for item in items]),
            sizes=np.concatenate([np.zeros(0), *(sizes.reshape(-1) for sizes in tables.values())]),
            first=_integers([first[id(item.table)] for item in items]),
            rows=_integers([item.variables[0] for item in items]),
            columns=_integers([item.variables[-1] for item in items]),
            row_steps=_integers([item.table.sizes.shape[1] if item.table.sizes.ndim == 2 else 1 for item in items]),
            column_steps=_integers([item.table.sizes.ndim - 1 for item in items]),
            numbers=_integers([item.number for item in items]),
            items=tuple(items),
        )

    def __call__(self, choice: Sequence[int]) -> Floats:
        """Bytes in use at each point, [points]."""
        options = np.asarray(choice, dtype=np.int64)
        if not len(self.first):
            return np.zeros(self.points)
        places = self.first + options[self.rows] * self.row_steps + options[self.columns] * self.column_steps
        sizes = self.sizes[places]
        for number in np.flatnonzero(np.isnan(sizes)):
            item = self.items[number]
            sizes[number] = self.sizes[places[number]] = item.table.at(*(choice[each] for each in item.variables))
        return self._in_use(sizes)

    def items_at(self, point: int) -> list[UsedBytes]:
        """What is in memory at one point."""
        places = np.flatnonzero((self.births <= point) & (point < self.ends))
        return [self.items[place] for place in places.tolist()]

    def least_peak(self, allowed: Mapping[int, _Mask]) -> float:
        """Bytes below which the peak of no choice is: at each point, everything as small as it can be.

        Args:
            allowed: variable to a mask of its options, not empty; absent variables are free.
        """
        known: dict[tuple[int, ...], float] = {}
        sizes = np.zeros(len(self.items))
        for place, item in enumerate(self.items):
            variables = item.variables
            is_diagonal = len(variables) > 1 and variables[0] == variables[-1]
            key = (id(item.table), is_diagonal, *(variable if variable in allowed else -1 for variable in variables))
            if key not in known:
                known[key] = item.table.least([allowed.get(each) for each in variables], is_diagonal=is_diagonal)
            sizes[place] = known[key]
        return float(self._in_use(sizes).max(initial=0.0))

    def _in_use(self, sizes: Floats) -> Floats:
        """Bytes at each point, of items of these sizes."""
        sizes = sizes * self.numbers
        count = self.points + 1
        change = np.bincount(self.births, sizes, count) - np.bincount(self.ends, sizes, count)
        return np.asarray(np.cumsum(change)[:-1], dtype=np.float64)


def _integers(values: Sequence[int]) -> _Integers:
    return np.array(values, dtype=np.int64)
