"""`autoshard::dropout`: dropout of the same elements on every mesh, because the mask follows the global index.

Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting" (JMLR 2014), with the
mask from Philox (`philox.py`). The backward draws the same mask again, so no mask is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.kernels.library import accumulation_dtype, define, differentiate
from autoshard.kernels.philox import keep_mask, keep_scale


def dropout_reference(
    x: Tensor, seed: Tensor, p: float, site: int, offset: Sequence[int], global_shape: Sequence[int]
) -> Tensor:
    """Zero each element with probability p, and scale the other elements by 1 / (1 - p).

    Args:
        x: a shard of a global array, of any shape and float dtype.
        seed: int64 scalar tensor.
        site: the number of this random operator in the program.
        offset: global index of `x`'s first element, one entry per dim.
        global_shape: the shape of the whole array.
    """
    keep = keep_mask(x.shape, offset, global_shape, seed, site, p)
    scaled = x.to(accumulation_dtype(x.dtype)) * keep_scale(p)
    return torch.where(keep, scaled, 0.0).to(x.dtype).contiguous()


def _fake(x: Tensor, seed: Tensor, p: float, site: int, offset: Sequence[int], global_shape: Sequence[int]) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, *ctx.constants = inputs
    ctx.save_for_backward(seed)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    return dropout(grad_out, seed, *ctx.constants), None, None, None, None, None


dropout = define(
    "dropout",
    "(Tensor x, Tensor seed, float p, SymInt site, SymInt[] offset, SymInt[] global_shape) -> Tensor",
    dropout_reference,
    _fake,
)
differentiate(dropout, _setup_context, _backward)
