"""What an operator does, in plain numbers: the interface between `operators` (counts) and `compute` (times)."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What bounds an operator."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    GATHER = "gather"
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


class Work(NamedTuple):
    """FLOPs and bytes of one operator. `products` lists its matrix products, if it is made of them."""

    flops: float
    bytes_read: float
    bytes_written: float
    kind: Kind
    dtype: str
    products: tuple[MatmulShape, ...] = ()
