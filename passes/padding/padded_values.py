"""Padded tensors: where they have padding, and which numbers may be there.

The padded program runs on padded inputs, and the exact program on the same inputs without padding. A dim is a product
of parts, major to minor. For example, `[B, T, D]` flattened to `[B T, D]` has the parts B and T in its first dim. Each
part has a size in the padded program and a size in the exact program. If the sizes differ, the part is padded after its
exact size.

A region is a set of padded parts. It stands for the elements that lie in the padding of exactly these parts. The empty
region is the clean part, whose elements the exact program has too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from passes.padding.contents import PaddedContent, either

Part = tuple[int, int]
"""The size of a part of a dim in the padded program, and its size in the exact program, which has no padding."""

Dim = tuple[Part, ...]

Place = tuple[int, int]
"""The index of a dim, and the index of a part among the parts of the dim."""

Region = frozenset[Place]

CLEAN: Region = frozenset()

_MOST = 4
"""The most padded parts of a tensor. Each further part would double the number of regions."""


class ReachedError(Exception):
    """Padding may reach the clean part of a call's result, which are its elements outside padding.

    The text continues a sentence that begins with the call's operator.
    """


@dataclass(frozen=True, slots=True)
class PaddedValue:
    """A tensor of the padded program: the parts of each dim, and bounds of the numbers in each region."""

    dims: tuple[Dim, ...]
    contents: Mapping[Region, PaddedContent]

    @classmethod
    def of(cls, dims: Sequence[Dim], content: Callable[[Region], PaddedContent]) -> PaddedValue:
        """Return a padded value with these dims; `content` is called for the content of each region."""
        dims = tuple(dims)
        contents = {region: content(region) for region in regions_of(padded_places(dims))}
        contents[CLEAN] = replace(contents[CLEAN], is_clean=True)
        return cls(dims, contents)

    @property
    def places(self) -> tuple[Place, ...]:
        """The places of this tensor's padded parts, in order."""
        return padded_places(self.dims)

    @property
    def is_padded(self) -> bool:
        """Whether any part of any dim is padded."""
        return bool(self.places)

    def part(self, place: Place) -> Part:
        """Return the padded and the exact size of the part of a dim at `place`."""
        return self.dims[place[0]][place[1]]

    def content(self, region: Iterable[Place]) -> PaddedContent:
        """Return bounds of the numbers in a region of this tensor."""
        return self.contents[frozenset(region)]

    def is_dim_padded(self, dim: int) -> bool:
        """Whether dim number `dim` has a padded part; a tensor without dims has none."""
        return any(place[0] == dim for place in self.places)

    def plain_part(self, dim: int) -> Part:
        """Return the padded and the exact size of dim number `dim`.

        Raises:
            ReachedError: the dim is a product of several parts, and a part is padded.
        """
        if len(self.dims[dim]) == 1:
            return self.dims[dim][0]
        if self.is_dim_padded(dim):
            raise ReachedError("cuts or orders a dim that is merged from the padded dim and another one")
        return (size := math.prod(exact for _, exact in self.dims[dim]), size)

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the tensor's shape, in the padded program for `index` 0, or in the exact program for `index` 1."""
        return tuple(math.prod(part[index] for part in dim) for dim in self.dims)

    def replaced(self, dim: int, part: Part, content: Callable[[Region], PaddedContent]) -> PaddedValue:
        """Return this value with dim number `dim` replaced by the single part `part`.

        `content` is called for the content of each region.
        """
        return PaddedValue.of((*self.dims[:dim], (part,), *self.dims[dim + 1 :]), content)


def is_padded_part(part: Part) -> bool:
    """Whether a part has padding: its sizes in the padded and the exact program differ."""
    return part[0] != part[1]


def padded_places(dims: Sequence[Dim]) -> tuple[Place, ...]:
    """Return the places of all padded parts of `dims`, in order."""
    return tuple(
        (dim, index) for dim, parts in enumerate(dims) for index, part in enumerate(parts) if is_padded_part(part)
    )


def regions_of(places: Sequence[Place]) -> Iterator[Region]:
    """Yield all regions of a tensor whose padded parts are at `places`, beginning with the clean part.

    Raises:
        ReachedError: there are more than `_MOST` padded parts.
    """
    if len(places) > _MOST:
        raise ReachedError(f"has more than {_MOST} padded dims")
    for count in range(len(places) + 1):
        yield from map(frozenset, itertools.combinations(places, count))


def joined(value: PaddedValue, region: Region, place: Place) -> PaddedContent:
    """Return the content of two regions together: `region`, and `region` without the padding at `place`."""
    return either((value.content(region), value.content(region - {place})))
