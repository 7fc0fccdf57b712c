"""The attention kernels over sequences of unequal length that lie behind each other: `autoshard::packed_attention`.

The kernels are those of `triton_attention.py` and `triton_attention_backward.py`, with a `Packing`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoshard.kernels.kernel import Kernel, Specimen
from autoshard.kernels.launch import ARCHITECTURES, require
from autoshard.kernels.library import define
from autoshard.kernels.packed_attention import (
    CONSTANTS,
    fake_backward,
    heads_first,
    packed_attention,
    packed_attention_backward,
)
from autoshard.kernels.triton_attention import Packing, attend_into, forward_specimen, refuse_heads
from autoshard.kernels.triton_attention_backward import attend_backward_into, backward_specimens


def why_not_packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    is_causal: bool,
    window: int,
    scale: float,
) -> str | None:
    """Why the kernel cannot stand in for `autoshard::packed_attention`, or None."""
    return refuse_heads(q=q, k=k, v=v)


def why_not_packed_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    is_causal: bool,
    window: int,
    scale: float,
) -> str | None:
    """Why the kernel cannot stand in for `autoshard::packed_attention_backward`, or None."""
    return refuse_heads(grad_out=grad_out, q=q, k=k, v=v)


def _packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    is_causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    require("triton_packed_attention", refuse_heads(q=q, k=k, v=v))
    out, lse = _packed_attention_fake(q)
    packing = Packing(query_starts.contiguous(), key_starts.contiguous())
    operands = (heads_first(q), heads_first(k), heads_first(v))
    attend_into(out, lse, *operands, scale, is_causal=is_causal, window=window, packing=packing)
    return out, lse


def _packed_attention_fake(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _packed_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    is_causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    require("triton_packed_attention_backward", refuse_heads(grad_out=grad_out, q=q, k=k, v=v))
    grads = fake_backward(grad_out, q, k, v)
    packing = Packing(query_starts.contiguous(), key_starts.contiguous())
    operands = (heads_first(grad_out), heads_first(q), heads_first(k), heads_first(v), heads_first(out))
    attend_backward_into(grads, *operands, lse[None], scale, is_causal=is_causal, window=window, packing=packing)
    return grads


triton_packed_attention = define(
    "triton_packed_attention",
    f"(Tensor q, Tensor k, Tensor v, {CONSTANTS}) -> (Tensor out, Tensor lse)",
    _packed_attention,
    _packed_attention_fake,
)
triton_packed_attention_backward = define(
    "triton_packed_attention_backward",
    f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {CONSTANTS})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    _packed_attention_backward,
    fake_backward,
)

_STARTS = "*i32 *i32"


def _backward_specimens(size: int, architecture: str) -> tuple[Specimen, ...]:
    """The two kernels that know of sequences; the third does not."""
    return backward_specimens(size, architecture, _STARTS)[:2]


KERNELS = (
    Kernel(
        packed_attention,
        triton_packed_attention,
        why_not_packed_attention,
        tuple(forward_specimen(size, _STARTS) for size in (64, 128)),
    ),
    Kernel(
        packed_attention_backward,
        triton_packed_attention_backward,
        why_not_packed_attention_backward,
        tuple(found for size in (64, 128) for target in ARCHITECTURES for found in _backward_specimens(size, target)),
    ),
)
