"""States of a value of a forward: how the value of a part of the batch relates to the value of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class Same:
    """The same for all parts, but for the factor m ** exponent."""

    exponent: int = 0


@dataclass(frozen=True, slots=True)
class SlicedDim:
    """A part has its own slice of a dim."""

    dim: int
    exponent: int = 0


@dataclass(frozen=True, slots=True)
class BatchIndices:
    """Indices along a dim of the batch, as `arange(len(x))` counts them; `size` is that of a part's dim.

    A part counts from zero. So an index that is used to read a part reads the sample that it stands for.
    """

    dim: int
    size: int


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over the parts of terms (a count or None, and an exponent), and perhaps of what does not depend on them."""

    terms: frozenset[tuple[fx.Node | None, int]]
    has_constant: bool = False


@dataclass(frozen=True, slots=True)
class OfInputs:
    """Computed from sums over inputs, and from nothing that is trained."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """Not made of the values of parts, for what `node` does."""

    node: fx.Node
    why: str


State = Same | SlicedDim | BatchIndices | Sum | OfInputs | Mixed
