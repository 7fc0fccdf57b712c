"""Padded tensors: the padded parts of their dims, and the content of their regions.

A dim is a product of parts, major to minor: `[B, T, D]` flattened to `[B T, D]` has the parts B and T in its first dim.
Each part has a size in the padded program and a size in the exact program. If they differ, the part is padded after its
exact size. A region is a set of padded parts: the elements in the padding of exactly these parts. The empty region is
the clean part, which the exact program has too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from passes.padding.contents import PaddedContent, either

Part = tuple[int, int]
"""The size of a part of a dim in the padded program, and in the exact one."""

Dim = tuple[Part, ...]

Place = tuple[int, int]
"""The number of a dim, and of a part in the dim."""

Region = frozenset[Place]

CLEAN: Region = frozenset()

_MOST = 4
"""Padded parts of a tensor at most: regions double with each."""


class ReachedError(Exception):
    """Padding may reach the clean part of a call; the text describes the call."""


@dataclass(frozen=True, slots=True)
class PaddedValue:
    """A tensor of both programs.

    Args:
        dims: the parts of each dim.
        contents: the content of each region.
    """

    dims: tuple[Dim, ...]
    contents: Mapping[Region, PaddedContent]

    @classmethod
    def of(cls, dims: Sequence[Dim], content: Callable[[Region], PaddedContent]) -> PaddedValue:
        """The value with the content of every region."""
        dims = tuple(dims)
        contents = {region: content(region) for region in regions_of(padded_places(dims))}
        contents[CLEAN] = replace(contents[CLEAN], is_clean=True)
        return cls(dims, contents)

    @property
    def places(self) -> tuple[Place, ...]:
        """Places of the padded parts."""
        return padded_places(self.dims)

    @property
    def is_padded(self) -> bool:
        """Whether any part is padded."""
        return bool(self.places)

    def part(self, place: Place) -> Part:
        """The sizes of a part."""
        return self.dims[place[0]][place[1]]

    def content(self, region: Iterable[Place]) -> PaddedContent:
        """Content of a region."""
        return self.contents[frozenset(region)]

    def is_dim_padded(self, dim: int) -> bool:
        """Whether a dim has a padded part."""
        return any(map(is_padded_part, self.dims[dim]))

    def plain_part(self, dim: int) -> Part:
        """The single part of a dim.

        Raises:
            ReachedError: the dim is a product of several parts, and a part is padded.
        """
        if len(self.dims[dim]) == 1:
            return self.dims[dim][0]
        if self.is_dim_padded(dim):
            raise ReachedError("cuts or orders a dim that is merged from the padded dim and another one")
        return (size := math.prod(exact for _, exact in self.dims[dim]), size)

    def shape(self, index: int) -> tuple[int, ...]:
        """The sizes of its dims: 0 in the padded program, 1 in the exact program."""
        return tuple(math.prod(part[index] for part in dim) for dim in self.dims)

    def replaced(self, dim: int, part: Part, content: Callable[[Region], PaddedContent]) -> PaddedValue:
        """The value with one part in place of a dim."""
        return PaddedValue.of((*self.dims[:dim], (part,), *self.dims[dim + 1 :]), content)


def is_padded_part(part: Part) -> bool:
    """Whether a part has another size in the exact program."""
    return part[0] != part[1]


def padded_places(dims: Sequence[Dim]) -> tuple[Place, ...]:
    """The places of the padded parts of dims."""
    return tuple(
        (dim, index) for dim, parts in enumerate(dims) for index, part in enumerate(parts) if is_padded_part(part)
    )


def regions_of(places: Sequence[Place]) -> Iterator[Region]:
    """All regions of padded parts, the clean one first.

    Raises:
        ReachedError: there are too many.
    """
    if len(places) > _MOST:
        raise ReachedError(f"has more than {_MOST} padded dims")
    for count in range(len(places) + 1):
        yield from map(frozenset, itertools.combinations(places, count))


def joined(value: PaddedValue, region: Region, place: Place) -> PaddedContent:
    """Content of a region, joined with the clean part of one of its padded parts."""
    return either((value.content(region), value.content(region - {place})))
