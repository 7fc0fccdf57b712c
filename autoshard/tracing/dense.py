"""Gradients of lookups are dense in programs, whatever `sparse=` says: the same numbers, zeros among them.

A sparse gradient has as many rows as were looked up, which a sharded table would not have on each of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

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


DENSE: dict[OpOverload, Callable[..., Any]] = {
    aten.embedding_backward.default: _embedding_backward,
    aten.gather_backward.default: _gather_backward,
    aten.embedding_bag.default: _embedding_bag,
    aten.embedding_bag.padding_idx: _embedding_bag,
}
"""Composite operators of torch and what stands for them while a model is traced."""
