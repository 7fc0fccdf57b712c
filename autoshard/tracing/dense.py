"""Replaces sparse gradients and sparse products by dense tensors with the same numbers, zeros included.

A sparse gradient has one row per lookup, and ranks of a sharded table would have different numbers of rows. A plan does
not know how many elements a sparse matrix stores, so `torch.sparse.mm` multiplies the dense matrix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor

from autoshard.tracing.replaced import replaced

aten = torch.ops.aten


def _embedding_backward(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool, sparse: bool
) -> Tensor:
    return aten.embedding_dense_backward.default(grad, indices, num_weights, padding_idx, scale_grad_by_freq)


def _gather_backward(grad: Tensor, x: Tensor, dim: int, index: Tensor, sparse_grad: bool) -> Tensor:
    return grad.new_zeros(x.shape).scatter_add(dim, index, grad)


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rest = (scale_grad_by_freq, mode, False, per_sample_weights, include_last_offset)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    is_trained = weight.requires_grad and torch.is_grad_enabled()
    of = aten._embedding_bag.default if is_trained else aten._embedding_bag_forward_only.default
    return of(weight.contiguous(), indices.contiguous(), offsets.contiguous(), *rest, padding)


def _sparse_product(left: Tensor, right: Tensor) -> Tensor:
    if left.layout is not torch.strided and right.layout is not torch.strided:
        return aten._sparse_sparse_matmul.default(left, right)
    return aten.mm.default(*(x if x.layout is torch.strided else x.to_dense() for x in (left, right)))


def sparse_coo_tensor(indices: Any, values: Any, size: Any = None, **options: Any) -> Tensor:
    """Return `torch.sparse_coo_tensor(...)`; if `size` is given and values require grad, as a dense tensor.

    A trace would lose the gradient of a sparse tensor.
    """
    is_trained = isinstance(values, Tensor) and values.requires_grad and torch.is_grad_enabled()
    if not is_trained or size is None:
        return torch.sparse_coo_tensor(indices, values, *() if size is None else (size,), **options)
    values = values.to(dtype=options.get("dtype"), device=options.get("device"))
    places = torch.as_tensor(indices, device=values.device).unbind()
    return values.new_zeros(size).index_put(places, values, accumulate=True)


def _to_dense(self: Tensor, dtype: torch.dtype | None = None, *, masked_grad: bool | None = None) -> Tensor:
    if self.layout is torch.strided:
        return self if dtype is None else self.to(dtype)
    return aten._to_dense.default(self, dtype, masked_grad)


def differentiating_to_dense() -> contextlib.AbstractContextManager[None]:
    """Return a context in which `x.to_dense()` of a sparse tensor has a gradient, which torch's method loses in a
    trace."""
    return replaced({(FunctionalTensor, "to_dense"): _to_dense})


DENSE: dict[OpOverload, Callable[..., Any]] = {
    aten.embedding_backward.default: _embedding_backward,
    aten.gather_backward.default: _gather_backward,
    aten.embedding_bag.default: _embedding_bag,
    aten.embedding_bag.padding_idx: _embedding_bag,
    aten._sparse_mm.default: _sparse_product,
}
"""Composite operator of torch → the function that replaces it during a trace."""
