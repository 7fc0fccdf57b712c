"""Work of an operator in plain numbers: the interface between `operators` (counts) and `compute` (times)."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The resource that limits an operator."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    GATHER = "gather"
    FACTORISATION = "factorisation"
    VIEW = "view"


class TensorInfo(NamedTuple):
    """A tensor's local shape, bytes per element and dtype name ("bf16", "f16", "f32", "f64", "f8", "i64", "bool")."""

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
        """2 * batch * m * n * k."""
        return 2 * self.batch * self.m * self.n * self.k


class AttentionShape(NamedTuple):
    """Attention of `heads` (batch times heads): [queries, depth] by [keys, depth], values [keys, value_depth]."""

    heads: int
    queries: int
    keys: int
    depth: int
    value_depth: int
    causal: bool = False
    backward: bool = False

    @property
    def flops(self) -> float:
        """Dao 2023 (FlashAttention-2, section 4.1): 2 * heads * queries * keys * (depth + value_depth).

        Half of it when causal; 2.5 times as much backward, which recomputes the scores.
        """
        pairs = self.queries * self.keys * (0.5 if self.causal else 1.0)
        return (2.5 if self.backward else 1.0) * 2 * self.heads * pairs * (self.depth + self.value_depth)


class Work(NamedTuple):
    """FLOPs and bytes of one operator.

    `products` lists its matrix products, if it consists of them, and `attention` is the shape of a fused attention.
    `steps` counts sequential parts (the panels of a factorisation), each with its own launch. `recomputed_flops` of
    `flops` repeat a result of the forward, which the model's FLOPs count once.
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
