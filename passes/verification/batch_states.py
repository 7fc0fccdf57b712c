"""States of a value of the forward, which say how its values in the micro-batches relate to its value in the batch.

A micro-batch is called a *part*, and m is the number of parts. `weigh_loss` derives a state for each value.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class Same:
    """All m parts have the same value. It is the value of the batch, multiplied by m ** exponent."""

    exponent: int = 0


@dataclass(frozen=True, slots=True)
class SlicedDim:
    """Each of the m parts has its own samples, which lie along dim `dim`.

    They are a part of the batch's value, multiplied by m ** exponent. The dim has `before` equal blocks, each with all
    samples. For example, `x.transpose(0, 1).flatten(0, 1)` has a block for each time.
    """

    dim: int
    exponent: int = 0
    before: int = 1


@dataclass(frozen=True, slots=True)
class BatchIndices:
    """Indices of the samples of a batch, along dim `dim` of the value, as `arange(len(x))` makes them.

    A part has `size` samples, and counts them from zero. So an index is only right where it reads or writes the part's
    own samples.
    """

    dim: int
    size: int


@dataclass(frozen=True, slots=True)
class Sum:
    """The value of the batch is a sum over the parts.

    Args:
        terms: pairs (count, e). Each of the m parts adds its own value, divided by m ** e. If the loss divides by a
            count, such as the number of targets, `count` is the node of the count. Otherwise `count` is None.
        has_constant: whether the value also has an addend that does not depend on the parts.
    """

    terms: frozenset[tuple[fx.Node | None, int]]
    has_constant: bool = False


@dataclass(frozen=True, slots=True)
class OfInputs:
    """A value of the batch that is computed from sums over the parts, and depends on inputs and buffers only."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """The value of the batch does not follow from the values of the parts.

    `node` is the first call that mixes the parts, and `why` the reason, as in "mixes samples across the batch".
    """

    node: fx.Node
    why: str


State = Same | SlicedDim | BatchIndices | Sum | OfInputs | Mixed
