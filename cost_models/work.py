"""The work of an operator in plain numbers. `operators` counts it, and `compute` turns it into seconds."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """Kind of an operator, by which its time is computed. Pointwise, reduction and gather are bound by memory."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    GATHER = "gather"
    FACTORISATION = "factorisation"
    VIEW = "view"


class TensorInfo(NamedTuple):
    """A tensor's local shape, bytes per element, and dtype name, such as "bf16", "f32", "f8", "i64" or "bool"."""

    shape: tuple[int, ...]
    itemsize: int
    dtype: str


class MatmulShape(NamedTuple):
    """`batch` products of [m, k] by [k, n]: 2 * batch * m * n * k FLOPs."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """FLOPs of all products: 2 * batch * m * n * k."""
        return 2 * self.batch * self.m * self.n * self.k


class AttentionShape(NamedTuple):
    """Shape of an attention call.

    Queries are [heads, queries, depth], keys [heads, keys, depth], values [heads, keys, value_depth]. `heads` is the
    batch size times the number of heads.
    """

    heads: int
    queries: int
    keys: int
    depth: int
    value_depth: int
    causal: bool = False
    backward: bool = False

    @property
    def flops(self) -> float:
        """FLOPs: 2 * heads * queries * keys * (depth + value_depth) (Dao 2023, FlashAttention-2, section 4.1).

        Causal attention has half as many. The backward, which recomputes the scores, has 2.5 times as many.
        """
        pairs = self.queries * self.keys * (0.5 if self.causal else 1.0)
        return (2.5 if self.backward else 1.0) * 2 * self.heads * pairs * (self.depth + self.value_depth)


class Work(NamedTuple):
    """FLOPs and bytes of one operator.

    Args:
        flops, bytes_read, bytes_written: floating-point operations, and bytes moved from and to memory.
        kind: kind of the operator.
        products: the matrix products that it consists of, if any.
        attention: shape of a fused attention.
        steps: number of sequential parts, e.g. the panels of a factorisation; each has its own launch.
        recomputed_flops: the part of `flops` that repeats a result of the forward. The model's FLOPs do not include it.
    """

    flops: float
    bytes_read: float
    bytes_written: float
    kind: Kind
    dtype: str
    products: tuple[MatmulShape, ...] = ()
    attention: AttentionShape | None = None
    steps: int = 1
    recomputed_flops: float = 0.0
