"""States of a value of a forward: how the value of a part of the batch relates to the value of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class Same:
    """Equal in all parts, except for the factor m ** exponent."""

    exponent: int = 0


@dataclass(frozen=True, slots=True)
class SlicedDim:
    """Each part has its own slice of a dim."""

    dim: int
    exponent: int = 0


@dataclass(frozen=True, slots=True)
class BatchIndices:
    """Indices along a dim of the batch, as `arange(len(x))` counts them; `size` is the size of a part's dim.

    A part counts from zero. So an index is right if it reads the part's own sample.
    """

    dim: int
    size: int


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over the parts of terms (a count or None, and an exponent), and optionally a value independent of the
    parts.
    """

    terms: frozenset[tuple[fx.Node | None, int]]
    has_constant: bool = False


@dataclass(frozen=True, slots=True)
class OfInputs:
    """Computed from sums over inputs, and from no trained value."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """Not a sum over the parts, because of the call `node`."""

    node: fx.Node
    why: str


State = Same | SlicedDim | BatchIndices | Sum | OfInputs | Mixed
