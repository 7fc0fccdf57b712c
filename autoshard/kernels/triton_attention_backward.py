"""The backward of `triton_attention.py`: probabilities are computed again from the log-sum-exp.

Dao, "FlashAttention-2" (2023), algorithm 2, in two kernels, so that no sum is shared by programs: one holds keys and
walks the queries that see them (dk, dv, summed over the heads of a group), one holds queries and walks keys (dq).

    p = exp(scale q k^T - lse),  delta = sum_e dout out,  ds = p (dout v^T - delta)
    dv = p^T dout,  dk = scale ds^T q,  dq = scale ds k
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.attention import attention_backward, empty_by_rows
from autoshard.kernels.kernel import Kernel, Specimen, block_specimen
from autoshard.kernels.launch import ARCHITECTURES, architecture_of, launch, require
from autoshard.kernels.library import define
from autoshard.kernels.triton_attention import (
    CONSTANTS,
    AttentionTile,
    grid_of,
    head_block,
    refuse_extras,
    refuse_heads,
    refuse_what_torch_fuses,
    rows_adjacent,
)
from autoshard.kernels.triton_product import precision_of, product

_DELTA_ROWS = 32


@triton.jit
def attention_delta_kernel(
    grad_out_ptr,
    out_ptr,
    delta_ptr,
    heads,
    queries,
    grad_stride_b,
    grad_stride_h,
    grad_stride_s,
    out_stride_b,
    out_stride_h,
    out_stride_s,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """grad_out_ptr, out_ptr [B, H, S, D], delta_ptr [B, H, S] float32. Programs: blocks of S, then B H."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    element = tl.arange(0, BLOCK_D)
    inside = (row < queries)[:, None] & (element < SIZE)[None, :]
    grad_place = batch * grad_stride_b + head * grad_stride_h + row[:, None] * grad_stride_s + element[None, :]
    out_place = batch * out_stride_b + head * out_stride_h + row[:, None] * out_stride_s + element[None, :]
    grad_out = tl.load(grad_out_ptr + grad_place, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + out_place, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        delta_ptr + tl.program_id(1).to(tl.int64) * queries + row, tl.sum(grad_out * out, axis=1), mask=row < queries
    )


@triton.jit
def _probabilities(
    q, k, lse, row, key, queries, keys, distance, scale, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """[rows, keys]: exp(scores - lse), 0 where a row does not see a key."""
    seen = (row < queries)[:, None] & (key < keys)[None, :]
    if CAUSAL:
        seen &= key[None, :] <= (row + distance)[:, None]
    # A row that sees nothing has lse = -inf; its keys are all masked.
    base = tl.where(lse == -float("inf"), 0.0, lse * 1.4426950408889634)
    scores = product(q, tl.trans(k), PRECISION) * scale - base[:, None]
    return tl.where(seen, tl.exp2(tl.where(seen, scores, 0.0)), 0.0)


@triton.jit
def attention_keys_kernel(
    grad_out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    delta_ptr,
    grad_k_ptr,
    grad_v_ptr,
    heads,
    group,
    queries,
    keys,
    grad_stride_b,
    grad_stride_h,
    grad_stride_s,
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    query_offset,
    key_offset,
    scale,
    CAUSAL: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """grad_out_ptr, q_ptr [B, H, S, D]; k_ptr, v_ptr [B, G, T, D]; lse_ptr, delta_ptr [B, H, S] float32; grad_k_ptr,
    grad_v_ptr [B, T, G, D] contiguous. Programs: blocks of T, then B G."""
    key_heads = heads // group
    batch = (tl.program_id(1) // key_heads).to(tl.int64)
    key_head = (tl.program_id(1) % key_heads).to(tl.int64)
    block = tl.program_id(0)
    all_rows = tl.cast(queries, tl.int64)  # one query is a constant, which has no `to`
    target = (batch * keys * key_heads + key_head) * SIZE
    first = block * BLOCK_N
    key = first + tl.arange(0, BLOCK_N)
    element = tl.arange(0, BLOCK_D)
    is_key = (key < keys)[:, None] & (element < SIZE)[None, :]
    place = key.to(tl.int64)[:, None]
    k_head, v_head = batch * k_stride_b + key_head * k_stride_h, batch * v_stride_b + key_head * v_stride_h
    k = tl.load(k_ptr + k_head + place * k_stride_s + element[None, :], mask=is_key, other=0.0)
    v = tl.load(v_ptr + v_head + place * v_stride_s + element[None, :], mask=is_key, other=0.0)
    distance = query_offset - key_offset
    begin, end = 0, queries
    if CAUSAL:
        begin = tl.maximum(0, first - distance) // BLOCK_M * BLOCK_M
    grad_k = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    grad_v = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    for member in range(group):
        head = key_head * group + member
        grad_head, q_head = batch * grad_stride_b + head * grad_stride_h, batch * q_stride_b + head * q_stride_h
        rows = (batch * heads + head) * all_rows
        for start in range(begin, end, BLOCK_M):
            row = start + tl.arange(0, BLOCK_M)
            is_query = (row < queries)[:, None] & (element < SIZE)[None, :]
            at = row.to(tl.int64)[:, None]
            q = tl.load(q_ptr + q_head + at * q_stride_s + element[None, :], mask=is_query, other=0.0)
            grad_out = tl.load(
                grad_out_ptr + grad_head + at * grad_stride_s + element[None, :], mask=is_query, other=0.0
            )
            lse = tl.load(lse_ptr + rows + row, mask=row < queries, other=0.0)
            delta = tl.load(delta_ptr + rows + row, mask=row < queries, other=0.0)
            weights = _probabilities(
                q, k, lse, row, key, queries, keys, distance, scale * 1.4426950408889634, CAUSAL, PRECISION
            )
            grad_v += product(tl.trans(weights.to(v.dtype)), grad_out, PRECISION)
            grad_weights = product(grad_out, tl.trans(v), PRECISION)
            grad_scores = weights * (grad_weights - delta[:, None])
            grad_k += product(tl.trans(grad_scores.to(k.dtype)), q, PRECISION)
    target += place * key_heads * SIZE + element[None, :]
    tl.store(grad_k_ptr + target, grad_k * scale, mask=is_key)
    tl.store(grad_v_ptr + target, grad_v, mask=is_key)


@triton.jit
def attention_queries_kernel(
    grad_out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    delta_ptr,
    grad_q_ptr,
    heads,
    group,
    queries,
    keys,
    grad_stride_b,
    grad_stride_h,
    grad_stride_s,
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    query_offset,
    key_offset,
    scale,
    CAUSAL: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Arguments of `attention_keys_kernel`; grad_q_ptr [B, S, H, D] contiguous. Programs: blocks of S, then B H."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    block = tl.program_id(0)
    rows = tl.program_id(1).to(tl.int64) * queries
    target = (batch * queries * heads + head) * SIZE
    first = block * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    element = tl.arange(0, BLOCK_D)
    is_query = (row < queries)[:, None] & (element < SIZE)[None, :]
    at = row.to(tl.int64)[:, None]
    grad_head, q_head = batch * grad_stride_b + head * grad_stride_h, batch * q_stride_b + head * q_stride_h
    q = tl.load(q_ptr + q_head + at * q_stride_s + element[None, :], mask=is_query, other=0.0)
    grad_out = tl.load(grad_out_ptr + grad_head + at * grad_stride_s + element[None, :], mask=is_query, other=0.0)
    lse = tl.load(lse_ptr + rows + row, mask=row < queries, other=0.0)
    delta = tl.load(delta_ptr + rows + row, mask=row < queries, other=0.0)
    k_ptr += batch * k_stride_b + head // group * k_stride_h
    v_ptr += batch * v_stride_b + head // group * v_stride_h
    distance = query_offset - key_offset
    begin, end = 0, keys
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(keys, first + BLOCK_M + distance))
    grad_q = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        is_key = (key < keys)[:, None] & (element < SIZE)[None, :]
        place = key.to(tl.int64)[:, None]
        k = tl.load(k_ptr + place * k_stride_s + element[None, :], mask=is_key, other=0.0)
        v = tl.load(v_ptr + place * v_stride_s + element[None, :], mask=is_key, other=0.0)
        weights = _probabilities(
            q, k, lse, row, key, queries, keys, distance, scale * 1.4426950408889634, CAUSAL, PRECISION
        )
        grad_weights = product(grad_out, tl.trans(v), PRECISION)
        grad_scores = weights * (grad_weights - delta[:, None])
        grad_q += product(grad_scores.to(k.dtype), k, PRECISION)
    tl.store(grad_q_ptr + target + at * heads * SIZE + element[None, :], grad_q * scale, mask=is_query)


def keys_tile(size: int, dtype: torch.dtype, architecture: str) -> AttentionTile:
    """Block sizes of the kernel that holds keys: its two sums leave room for half the queries, or half the keys."""
    tile = queries_tile(size, dtype, architecture)
    if architecture == "sm_80" and size <= 64:
        return replace(tile, keys=32)
    return replace(tile, queries=32) if 64 < size <= 128 and architecture != "gfx942" else tile


def queries_tile(size: int, dtype: torch.dtype, architecture: str) -> AttentionTile:
    """Block sizes of the kernel that holds queries, so that nothing spills at the usual sizes.

    An MI300's wavefronts of 64 threads have twice the registers of a warp: half of them do.
    """
    if dtype == torch.float32:
        return AttentionTile(32, 32, 4 if size <= 64 else 8, 1)
    if size <= 64:
        return AttentionTile(64, 64, 4, 2)
    if architecture == "gfx942" and size <= 128:
        return AttentionTile(64, 32, 4, 1)
    return AttentionTile(64, 64, 8, 2) if size <= 128 else AttentionTile(32, 32, 8, 1)


def why_not_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    site: int,
    offset: Sequence[int],
    global_shape: Sequence[int],
) -> str | None:
    """Why the kernel is not to stand in for `autoshard::attention_backward`, or None."""
    return (
        refuse_extras(mask, dropout_p)
        or refuse_heads(grad_out=grad_out, q=q, k=k, v=v)
        or refuse_what_torch_fuses(q, is_causal=is_causal, offset=offset)
    )


def flash_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    is_causal: bool = False,
    query_offset: int = 0,
    key_offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in their shapes and dtypes, by rows; arguments as in `flash_attention`.

    `out` and `lse` may be those of all shards of keys combined: then dq is this shard's addend.
    """
    require("flash_attention_backward", refuse_heads(grad_out=grad_out, q=q, k=k, v=v))
    grads = empty_by_rows(q), empty_by_rows(k), empty_by_rows(v)
    (batch, heads, queries, size), (groups, keys) = q.shape, k.shape[1:3]
    grad_out, q, k, v, out = map(rows_adjacent, (grad_out, q, k, v, out))
    lse, delta = lse.contiguous(), lse.new_empty((batch, heads, queries), dtype=torch.float32)
    width = head_block(size)
    launch(
        attention_delta_kernel,
        grid_of(queries, "BLOCK_M", batch * heads),
        q.device,
        *(grad_out, out, delta, heads, queries, *grad_out.stride()[:3], *out.stride()[:3]),
        SIZE=size,
        BLOCK_M=_DELTA_ROWS,
        BLOCK_D=width,
        num_warps=4,
    )
    strides = [stride for x in (grad_out, q, k, v) for stride in x.stride()[:3]]
    sizes = (heads, heads // groups, queries, keys, *strides, query_offset, key_offset, scale)
    constants = {"CAUSAL": is_causal, "SIZE": size}
    constants |= {"PRECISION": precision_of(attention_keys_kernel, q.dtype)}
    operands = (grad_out, q, k, v, lse, delta)
    architecture = architecture_of(q.device)
    tile = keys_tile(size, q.dtype, architecture)
    grid = grid_of(keys, "BLOCK_N", batch * groups)
    launch(attention_keys_kernel, grid, q.device, *operands, *grads[1:], *sizes, **constants, **_blocks(tile, width))
    tile = queries_tile(size, q.dtype, architecture)
    grid = grid_of(queries, "BLOCK_M", batch * heads)
    launch(attention_queries_kernel, grid, q.device, *operands, grads[0], *sizes, **constants, **_blocks(tile, width))
    return grads


def _blocks(tile: AttentionTile, width: int) -> dict[str, Any]:
    """A tile as a launch takes it."""
    blocks = {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys, "BLOCK_D": width}
    return blocks | {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    site: int,
    offset: Sequence[int],
    global_shape: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    require("triton_attention_backward", refuse_extras(mask, dropout_p))
    offsets = {"query_offset": offset[2], "key_offset": offset[3]}
    return flash_attention_backward(grad_out, q, k, v, out, lse, scale, is_causal=is_causal, **offsets)


def _attention_backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_by_rows(q), empty_by_rows(k), empty_by_rows(v)


triton_attention_backward = define(
    "triton_attention_backward",
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, Tensor? seed, "
    f"{CONSTANTS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    _attention_backward,
    _attention_backward_fake,
)


def backward_specimens(size: int, architecture: str) -> tuple[Specimen, ...]:
    """Compilations of the backward for heads of this size."""
    constants = {"CAUSAL": True, "SIZE": size, "PRECISION": "tf32"}
    operands, sizes = "*bf16 *bf16 *bf16 *bf16 *fp32 *fp32", " i32" * 18 + " fp32"
    width = head_block(size)
    keys, queries = (_blocks(tile(size, torch.bfloat16, architecture), width) for tile in (keys_tile, queries_tile))
    delta = {"SIZE": size, "BLOCK_M": _DELTA_ROWS, "BLOCK_D": width}
    found = (
        block_specimen(attention_keys_kernel, f"{operands} *bf16 *bf16{sizes}", size, **constants, **keys),
        block_specimen(attention_queries_kernel, f"{operands} *bf16{sizes}", size, **constants, **queries),
        block_specimen(attention_delta_kernel, "*bf16 *bf16 *fp32" + " i32" * 8, size, 4, **delta),
    )
    return tuple(replace(specimen, architecture=architecture) for specimen in found)


KERNELS = (
    Kernel(
        attention_backward,
        triton_attention_backward,
        why_not_attention_backward,
        tuple(
            found for size in (64, 128, 256) for target in ARCHITECTURES for found in backward_specimens(size, target)
        ),
    ),
)
