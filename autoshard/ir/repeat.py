"""Blocks of a model that a program leaves out, as they are like those beside them.

A model with a long list of blocks is planned by a few of them. Blocks of a list that repeat are cut into *units* of
`period` blocks each (two where blocks alternate between two kinds). The program holds the units at both ends of the
list; those between are *elided*, and the first unit behind them stands for them. Blocks keep their own numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Repeat:
    """A run of alike units of a list of blocks.

    Args:
        path: of the list ("model.layers").
        period: blocks in a unit.
        before: number of the first block of the last unit ahead of the elided ones.
        behind: number of the first block of the first unit behind them; it stands for them.

    Example:
        >>> Repeat("layers", period=1, before=1, behind=30).elided
        28
    """

    path: str
    period: int
    before: int
    behind: int

    @property
    def elided(self) -> int:
        """How many units are left out."""
        return (self.behind - self.before) // self.period - 1

    @property
    def units(self) -> tuple[int, ...]:
        """The first blocks of the two units ahead of the elided ones, and of the two behind them."""
        return self.before - self.period, self.before, self.behind, self.behind + self.period

    def place(self, path: str) -> tuple[int, str] | None:
        """Which of `units` a module or parameter is in, and where in it; None outside of them."""
        block, rest = self._split(path)
        for index, first in enumerate(self.units):
            if block is not None and first <= block < first + self.period:
                return index, f"{block - first}.{rest}"
        return None

    def alike(self, path: str) -> tuple[str, ...]:
        """What a path in the unit behind the elided ones stands for: itself last; any other path for itself."""
        block, rest = self._split(path)
        if block is None or not self.behind <= block < self.behind + self.period:
            return (path,)
        numbers = range(block - self.elided * self.period, block + 1, self.period)
        return tuple(".".join((self.path, str(number), *filter(None, (rest,)))) for number in numbers)

    def unit(self, path: str) -> tuple[int, str] | None:
        """First block of the unit that a path of the whole model is in, and its path in the unit that stands for it.

        None outside of the units that are elided or stand for them.
        """
        block, rest = self._split(path)
        if block is None or not self.before + self.period <= block < self.behind + self.period:
            return None
        offset = (block - self.before) % self.period
        return block - offset, ".".join((self.path, str(self.behind + offset), *filter(None, (rest,))))

    def beside(self, path: str, other: str) -> str | None:
        """The path at the same place of the unit that another path is in; None where one of them is in no block."""
        (block, rest), (unit, _) = self._split(path), self._split(other)
        if block is None or unit is None:
            return None
        number = self._first(unit) + block - self._first(block)
        return ".".join((self.path, str(number), *filter(None, (rest,))))

    def first_block(self, path: str) -> int | None:
        """First block of the unit that a path is in; None outside of `units` and of those between them."""
        block, _ = self._split(path)
        ahead, *_, last = self.units
        return self._first(block) if block is not None and ahead <= block < last + self.period else None

    def _first(self, block: int) -> int:
        return block - (block - self.before) % self.period

    def _split(self, path: str) -> tuple[int | None, str]:
        """Number of the block, None for what is in none of the list, and the path within."""
        number, _, rest = path.removeprefix(f"{self.path}.").partition(".")
        return (int(number), rest) if path.startswith(f"{self.path}.") and number.isdigit() else (None, "")


def names_alike(repeats: tuple[Repeat, ...], name: str) -> tuple[str, ...]:
    """The names in the whole model that a slot's name stands for ("exp_avg:layers.30.weight"), itself last."""
    prefix, colon, path = name.rpartition(":")
    for repeat in repeats:
        if repeat.place(path) is not None:
            return tuple(f"{prefix}{colon}{alike}" for alike in repeat.alike(path))
    return (name,)
