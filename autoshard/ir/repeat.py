"""Repeated blocks that a program leaves out, because an equal block behind them represents them.

A model with a long list of blocks is planned by a few of the blocks. Repeating blocks of a list are grouped into
*units* of `period` blocks each (two where blocks of two kinds alternate). The program contains the units at both ends
of the list. The units in between are left out, and the first unit behind the gap represents them. Blocks keep their own
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Repeat:
    """A run of equal units in a list of blocks. The program leaves out the units in the middle, which are the gap.

    Args:
        path: qualified name of the list ("model.layers").
        period: the number of blocks in a unit.
        before: index of the first block in the last unit ahead of the gap.
        behind: index of the first block in the first unit behind the gap. This unit stands for the units left out.

    Example:
        >>> Repeat("layers", period=1, before=1, behind=30).left_out  # blocks 2 to 29
        28
    """

    path: str
    period: int
    before: int
    behind: int

    @property
    def left_out(self) -> int:
        """Number of units that the program leaves out."""
        return len(self.inner)

    @property
    def inner(self) -> range:
        """Numbers of the first blocks of the left-out units."""
        return range(self.before + self.period, self.behind, self.period)

    @property
    def units(self) -> tuple[int, ...]:
        """Indices of the first blocks of four units, two ahead of the gap and two behind the gap."""
        return self.before - self.period, self.before, self.behind, self.behind + self.period

    def distance(self, here: int, there: int) -> int:
        """Return the number of units from `here` to `there`, the first blocks of two of `units`.

        Left-out units do not count.
        """
        return self.units.index(there) - self.units.index(here)

    def place(self, path: str) -> tuple[int, str] | None:
        """Return the place of a module or parameter in `units`: index of the unit, and path in the unit.

        For example (2, "0.mlp.weight"). None if `path` is in none of these four units.
        """
        block, rest = self._split(path)
        for index, first in enumerate(self.units):
            if block is not None and first <= block < first + self.period:
                return index, f"{block - first}.{rest}"
        return None

    def represented_by(self, path: str) -> tuple[str, ...]:
        """Return the paths of the whole model that `path` represents, `path` itself last.

        A path in the first unit behind the gap represents the same place in each left-out unit too. Every other path
        represents itself alone.
        """
        block, rest = self._split(path)
        if block is None or not self.behind <= block < self.behind + self.period:
            return (path,)
        numbers = range(block - self.left_out * self.period, block + 1, self.period)
        return tuple(".".join((self.path, str(number), *filter(None, (rest,)))) for number in numbers)

    def unit(self, path: str) -> tuple[int, str] | None:
        """Return the number of the first block of the unit with `path`, and the path that represents `path`.

        The representing path is at the same place in the unit behind the gap. None if `path` is neither in the unit
        behind the gap nor in a left-out unit.
        """
        block, rest = self._split(path)
        if block is None or not self.before + self.period <= block < self.behind + self.period:
            return None
        offset = (block - self.before) % self.period
        return block - offset, ".".join((self.path, str(self.behind + offset), *filter(None, (rest,))))

    def same_place_in_unit_of(self, path: str, other: str) -> str | None:
        """Return the path that has, in the unit of `other`, the same place as `path` has in its own unit.

        None if `path` or `other` is outside the list of blocks.
        """
        (block, rest), (unit, _) = self._split(path), self._split(other)
        if block is None or unit is None:
            return None
        number = self._first(unit) + block - self._first(block)
        return ".".join((self.path, str(number), *filter(None, (rest,))))

    def first_block(self, path: str) -> int | None:
        """Return the number of the first block of `path`'s unit; None outside `units` and the left-out units."""
        block, _ = self._split(path)
        ahead, *_, last = self.units
        return self._first(block) if block is not None and ahead <= block < last + self.period else None

    def _first(self, block: int) -> int:
        return block - (block - self.before) % self.period

    def _split(self, path: str) -> tuple[int | None, str]:
        """Return the number of the path's block and the path within the block; (None, "") outside the list."""
        number, _, rest = path.removeprefix(f"{self.path}.").partition(".")
        return (int(number), rest) if path.startswith(f"{self.path}.") and number.isdigit() else (None, "")


def names_represented_by(repeats: tuple[Repeat, ...], name: str) -> tuple[str, ...]:
    """Return the names in the whole model that a slot's name ("exp_avg:layers.30.weight") represents, itself last."""
    prefix, colon, path = name.rpartition(":")
    for repeat in repeats:
        if repeat.place(path) is not None:
            return tuple(f"{prefix}{colon}{path}" for path in repeat.represented_by(path))
    return (name,)
