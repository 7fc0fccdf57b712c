"""Rotary embedding of queries and keys in one launch. The same kernel computes the inverse rotation for the backward.

Su et al., "RoFormer" (2021), section 3.4.2. Elements i and j of a head form a pair, which is rotated by an angle. In
halves, j = i + D/2. Interleaved, i is even and j = i + 1. cos and sin have the angle's cosine and sine at both i and j:

    forward:  y_i = x_i cos_i - x_j sin_i,    y_j = x_j cos_j + x_i sin_j
    inverse:  x_i = y_i cos_i + y_j sin_j,    x_j = y_j cos_j - y_i sin_i      (the transpose)

cos and sin have a row for each position. So a rank with a shard of the sequence passes the rows of its own positions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.kernel import Form, FusedKernel
from autoshard.kernels.launch import cdiv, define_kernel, launch

_aten = torch.ops.aten
_BLOCK_S, _NUM_WARPS = 32, 4
_MAX_HEAD = 512
_TO_THE_END = 9223372036854775807


@triton.jit
def _rotate_head(
    x_ptr, out_ptr, x_stride, row, first, second, cos_1, sin_1, cos_2, sin_2, inside, SIZE: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    x_1 = tl.load(x_ptr + row * x_stride + first, mask=inside, other=0.0).to(tl.float32)
    x_2 = tl.load(x_ptr + row * x_stride + second, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        y_1 = x_1 * cos_1 + x_2 * sin_2
        y_2 = x_2 * cos_2 - x_1 * sin_1
    else:
        y_1 = x_1 * cos_1 - x_2 * sin_1
        y_2 = x_2 * cos_2 + x_1 * sin_2
    tl.store(out_ptr + row * SIZE + first, y_1, mask=inside)
    tl.store(out_ptr + row * SIZE + second, y_2, mask=inside)


@triton.jit
def rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    length,
    q_heads,
    k_heads,
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    angle_stride_b,
    SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Rotate BLOCK_S positions of one head of q or k.

    The queries q_ptr and q_out_ptr are [B, H, S, D]. The keys k_ptr and k_out_ptr are [B, G, S, D]. D has stride 1, and
    the results are contiguous. The angles' cos_ptr and sin_ptr are [1 or B, S, D], the last two dims contiguous. The
    grid has three axes: blocks of S, the heads of q and then of k, and B.
    """
    row = (tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)[:, None]
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    pair = tl.arange(0, BLOCK_P)[None, :]
    inside = (row < length) & (pair < SIZE // 2)
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + SIZE // 2
    angles = batch * angle_stride_b + row * SIZE
    cos_1 = tl.load(cos_ptr + angles + first, mask=inside, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin_ptr + angles + first, mask=inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos_ptr + angles + second, mask=inside, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin_ptr + angles + second, mask=inside, other=0.0).to(tl.float32)
    if head < q_heads:
        source = q_ptr + batch * q_stride_b + head * q_stride_h
        target = q_out_ptr + (batch * q_heads + head) * length * SIZE
        _rotate_head(source, target, q_stride_s, row, first, second, cos_1, sin_1, cos_2, sin_2, inside, SIZE, INVERSE)
    else:
        source = k_ptr + batch * k_stride_b + (head - q_heads) * k_stride_h
        target = k_out_ptr + (batch * k_heads + head - q_heads) * length * SIZE
        _rotate_head(source, target, k_stride_s, row, first, second, cos_1, sin_1, cos_2, sin_2, inside, SIZE, INVERSE)


def _refuse(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: object) -> str | None:
    shapes = f"q={tuple(q.shape)}, k={tuple(k.shape)}, cos={tuple(cos.shape)}, sin={tuple(sin.shape)}"
    if not (q.dim() == k.dim() == cos.dim() == sin.dim() == 4):
        return f"the kernel takes q [B, H, S, D], k [B, G, S, D], cos and sin [1 or B, 1, S, D]; found {shapes}."
    fits = q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:] == cos.shape[2:] and cos.shape == sin.shape
    if not fits or cos.shape[1] != 1 or cos.shape[0] not in (1, q.shape[0]) or q.dtype != k.dtype:
        return f"q, k, cos and sin do not fit each other: {shapes}, {q.dtype}, {k.dtype}."
    size = q.shape[3]
    return None if size % 2 == 0 and 2 <= size <= _MAX_HEAD else f"heads have {size} elements; found {shapes}."


def _fill(
    results: tuple[Tensor, Tensor], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> None:
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    (batch, heads, length, size), groups = q.shape, k.shape[1]
    launch(
        rotary_kernel,
        lambda blocks: (cdiv(length, blocks["BLOCK_S"]), heads + groups, batch),
        q.device,
        *(q, k, cos.contiguous(), sin.contiguous(), *results),
        *(length, heads, groups, *q.stride()[:3], *k.stride()[:3], length * size if cos.shape[0] > 1 else 0),
        SIZE=size,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        BLOCK_S=_BLOCK_S,
        BLOCK_P=triton.next_power_of_2(size // 2),
        num_warps=_NUM_WARPS,
    )


rotary = define_kernel(
    "triton_rotary",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> (Tensor q_out, Tensor k_out)",
    lambda q, k, **_: (q.new_empty(q.shape), k.new_empty(k.shape)),
    _fill,
    _refuse,
)


def _halves(like: Tensor, q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """Rotate `q` and `k` as `apply_rotary_pos_emb` of transformers does: x cos + rotate_half(x) sin."""
    half = like.shape[-1] // 2

    def rotate(x: Any) -> Any:
        upper, lower = _aten.slice.Tensor(x, 3, half, _TO_THE_END), _aten.slice.Tensor(x, 3, 0, half)
        turned = _aten.cat.default([_aten.neg.default(upper), lower], -1)
        return _aten.add.Tensor(_aten.mul.Tensor(x, cos), _aten.mul.Tensor(turned, sin))

    return rotate(q), rotate(k)


def _halves_backward(like: Tensor, q: Any, k: Any, cos: Any, sin: Any, k_heads: Any) -> tuple[Any, Any]:
    """Return the gradients of q and k that autograd derives from `_halves`.

    `q` and `k` are the gradients of the rotated queries and keys, and `k_heads` is the number of key heads.
    """
    batch, heads, length, size = like.shape
    half = size // 2

    def turn_back(grad: Any, count: Any) -> Any:
        shape, turned = [batch, count, length, size], _aten.mul.Tensor(grad, sin)
        lower, upper = _aten.slice.Tensor(turned, 3, 0, half), _aten.slice.Tensor(turned, 3, half, size)
        upper_part = _aten.slice_backward.default(_aten.neg.default(lower), shape, 3, half, _TO_THE_END, 1)
        lower_part = _aten.slice_backward.default(upper, shape, 3, 0, half, 1)
        return _aten.add.Tensor(_aten.add.Tensor(upper_part, lower_part), _aten.mul.Tensor(grad, cos))

    return turn_back(q, heads), turn_back(k, k_heads)


FUSED = (
    FusedKernel(
        rotary,
        (
            Form(
                _halves_backward,
                lambda like: {"interleaved": False, "inverse": True},
                {"k_heads": lambda arguments: arguments["k"].shape[1]},
                dims=4,
            ),
            Form(_halves, lambda like: {"interleaved": False, "inverse": False}, dims=4),
        ),
    ),
)
