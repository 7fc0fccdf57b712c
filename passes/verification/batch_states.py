"""States of a value of the forward, which say how its values in the micro-batches relate to its value in the batch.

A micro-batch is called a *part*, and m is the number of parts. `weigh_loss` derives a state for each value.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class Same:
    """All parts have the same value: the value of the batch times m ** exponent."""

    exponent: int = 0


@dataclass(frozen=True, slots=True)
class SlicedDim:
    """Each part has the values of its own samples, along dim `dim`: the batch's values times m ** exponent."""

    dim: int
    exponent: int = 0


@dataclass(frozen=True, slots=True)
class BatchIndices:
    """Indices of the samples of a batch, as `arange(len(x))` makes them.

    Each part counts its samples from zero. So an index is only right where it reads or writes the part's own samples.

    Args:
        dim: the dim along which the indices count.
        size: number of samples in a part.
    """

    dim: int
    size: int


@dataclass(frozen=True, slots=True)
class Sum:
    """The value of the batch is a sum over the parts.

    Args:
        terms: the terms of the value, as pairs (count, e). A part adds its own term, divided by m ** e. If the loss
            divides by a count, such as the number of targets, `count` is the node of the count; else None.
        has_constant: whether the value also has an addend that does not depend on the parts.
    """

    terms: frozenset[tuple[fx.Node | None, int]]
    has_constant: bool = False


@dataclass(frozen=True, slots=True)
class OfInputs:
    """The value is computed from sums over the batch, but depends on inputs and buffers alone, not on parameters."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """The value of the batch does not follow from the values of the parts.

    Args:
        node: the first call that mixes the parts.
        why: the reason, for the error message: "mixes samples across the batch".
    """

    node: fx.Node
    why: str


State = Same | SlicedDim | BatchIndices | Sum | OfInputs | Mixed
