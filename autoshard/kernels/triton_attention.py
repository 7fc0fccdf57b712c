"""Attention in one pass over keys and values: the forward. The backward is in `triton_attention_backward.py`.

Dao, "FlashAttention-2" (2023), algorithm 1, with sums in float32. A program holds BLOCK_M queries of one head and walks
the keys in blocks of BLOCK_N; m is the running maximum of the scores, l the running sum of exp(s - m):

    m' = max(m, max s),  l' = l exp(m - m') + sum exp(s - m'),  acc' = acc exp(m - m') + exp(s - m') v
    out = acc / l,  lse = m + log l                    (0 and -inf where a row sees no key)

Exponentials are taken to base 2, the scale having log2(e) in it. Query i of a shard is row i + query_offset of the
whole, key j is column j + key_offset; causal means column <= row. Blocks of keys that no query of a program sees are
skipped; only those at the edges are masked. Heads that share a key head read it from the cache of the device. The
log-sum-exp of shards of keys is what their results are combined by: lse = logaddexp(lse_1, lse_2),
out = sum_i exp(lse_i - lse) out_i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.attention import attention, claimed, empty_by_rows, empty_results
from autoshard.kernels.kernel import Kernel, Specimen, block_specimen
from autoshard.kernels.launch import cdiv, launch, refuse_dtypes, require
from autoshard.kernels.library import define
from autoshard.kernels.native_attention import HEAD_STEP
from autoshard.kernels.triton_product import precision_of, product

MAX_HEAD = 256
_LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    acc, total, maximum, q, k_ptr, v_ptr, k_stride, v_stride, first, last, row, keys, distance, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys first, ..., last - 1 to the running sums; `distance` is query_offset - key_offset."""
    element = tl.arange(0, BLOCK_D)
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = (key < keys)[:, None] & (element < SIZE)[None, :]
        place = key.to(tl.int64)[:, None]
        k = tl.load(k_ptr + place * k_stride + element[None, :], mask=inside, other=0.0)
        scores = product(q, tl.trans(k), PRECISION) * scale
        if MASKED:
            seen = (key < keys)[None, :]
            if CAUSAL:
                seen &= key[None, :] <= (row + distance)[:, None]
            scores = tl.where(seen, scores, -float("inf"))
        above = tl.maximum(maximum, tl.max(scores, axis=1))
        # While a row has seen nothing, subtract 0: exp2(-inf - 0) = 0, not NaN.
        base = tl.where(above == -float("inf"), 0.0, above)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + place * v_stride + element[None, :], mask=inside, other=0.0)
        acc = acc * shrink[:, None] + product(weights.to(v.dtype), v, PRECISION)
        maximum = above
    return acc, total, maximum


@triton.jit
def attention_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    heads,
    group,
    queries,
    keys,
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
    """q_ptr [B, H, S, D], k_ptr and v_ptr [B, G, T, D], with adjacent elements of a head; out_ptr [B, S, H, D] and
    lse_ptr [B, H, S] float32, contiguous. group = H / G. Programs: blocks of S, then B H."""
    block = tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    rows = (batch * heads + head) * queries
    out_ptr += (batch * queries * heads + head) * SIZE
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    element = tl.arange(0, BLOCK_D)
    is_query = (row < queries)[:, None] & (element < SIZE)[None, :]
    place = row.to(tl.int64)[:, None]
    source = q_ptr + batch * q_stride_b + head * q_stride_h
    q = tl.load(source + place * q_stride_s + element[None, :], mask=is_query, other=0.0)
    k_ptr += batch * k_stride_b + head // group * k_stride_h
    v_ptr += batch * v_stride_b + head // group * v_stride_h
    distance = query_offset - key_offset
    first_row, last_row = block * BLOCK_M, tl.minimum(block * BLOCK_M + BLOCK_M, queries) - 1
    # Keys [0, end) are seen by some row; [0, full_end) by all, so that they need no mask.
    end, full_end = keys, keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(keys, last_row + distance + 1))
        full_end = tl.maximum(0, tl.minimum(full_end, (first_row + distance + 1) // BLOCK_N * BLOCK_N))
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    maximum = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    acc, total, maximum = _attend(
        acc, total, maximum, q, k_ptr, v_ptr, k_stride_s, v_stride_s, 0, full_end, row, keys, distance, scale,
        tl.constexpr(False), CAUSAL, SIZE, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    acc, total, maximum = _attend(
        acc, total, maximum, q, k_ptr, v_ptr, k_stride_s, v_stride_s, full_end, end, row, keys, distance, scale,
        tl.constexpr(True), CAUSAL, SIZE, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    lse = tl.where(is_empty, -float("inf"), (maximum + tl.log2(divisor)) * 0.6931471805599453)
    tl.store(out_ptr + place * heads * SIZE + element[None, :], acc / divisor[:, None], mask=is_query)
    tl.store(lse_ptr + rows + row, lse, mask=row < queries)


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Queries and keys that a program holds, with its warps and the iterations that load ahead."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def forward_tile(size: int, dtype: torch.dtype) -> AttentionTile:
    """Block sizes of the forward, so that nothing spills on sm_90; float32 takes half the queries."""
    if dtype == torch.float32:
        return AttentionTile(32 if size > 64 else 64, 32, 4, 2)
    if size <= 64:
        return AttentionTile(128, 64, 4, 3)
    return AttentionTile(128, 64, 8, 3) if size <= 128 else AttentionTile(64, 32, 8, 2)


def head_block(size: int) -> int:
    """The power of two that a head is padded to; at least 16, the least that a matrix product takes."""
    return max(16, triton.next_power_of_2(size))


def rows_adjacent(x: Tensor) -> Tensor:
    """x with adjacent elements of a head; a copy only where they are not."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def refuse_heads(**tensors: Tensor) -> str | None:
    """The reason why the attention kernels do not take these, or None."""
    reason = refuse_dtypes(**tensors)
    shapes = ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in tensors.items())
    if reason is None and len({tensor.dtype for tensor in tensors.values()}) > 1:
        return f"the kernel takes tensors of one dtype; found {[str(tensor.dtype) for tensor in tensors.values()]}."
    if reason is None and len({tensor.shape[-1] for tensor in tensors.values()}) > 1:
        return f"the kernel takes keys and values of one size; found {shapes}."
    if reason is None and not all(1 <= tensor.shape[-1] <= MAX_HEAD and tensor.numel() for tensor in tensors.values()):
        return f"the kernel takes heads of 1 to {MAX_HEAD} elements, and no empty tensors; found {shapes}."
    return reason


def refuse_extras(mask: Tensor | None, dropout_p: float) -> str | None:
    """The reason why the attention kernels do not take a mask or dropout, or None."""
    if mask is not None:
        return "the kernel takes causal masks only; found a mask."
    return None if dropout_p == 0.0 else f"the kernel has no dropout; found dropout_p={dropout_p!r}."


def why_not_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    site: int,
    offset: Sequence[int],
    global_shape: Sequence[int],
) -> str | None:
    """Why the kernel is not to stand in for `autoshard::attention`, or None."""
    return (
        refuse_extras(mask, dropout_p)
        or refuse_heads(q=q, k=k, v=v)
        or refuse_what_torch_fuses(q, is_causal=is_causal, offset=offset)
    )


def refuse_what_torch_fuses(q: Tensor, *, is_causal: bool, offset: Sequence[int]) -> str | None:
    """The reason to leave attention to torch's fused kernel where it takes it in one call, or None.

    Forward and backward took an H200 5.0 ms in cuDNN's kernels and 15.0 ms in these, of 4 sequences of 2,048 bfloat16
    tokens and 16 heads of 128 in 8 layers; with 12 heads of 64, 16 sequences of 1,024 and 12 layers 4.3 ms and 5.9 ms.
    """
    is_square = not is_causal or offset[2] == offset[3]
    if q.dtype is torch.float32 or q.shape[-1] % HEAD_STEP or not is_square:
        return None
    return f"torch's fused kernels take {q.dtype} and heads of {q.shape[-1]} in one call, and are faster."


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    is_causal: bool = False,
    query_offset: int = 0,
    key_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of grouped heads; see the module's docstring.

    Args:
        q: [B, H, S, D].
        k, v: [B, G, T, D], with G a divisor of H.
        scale: factor on the scores.
        is_causal: queries see no later keys.
        query_offset, key_offset: global index of the first query and key.

    Returns:
        out [B, H, S, D] in q's dtype, lying as [B, S, H, D], and the log-sum-exp [B, H, S] in float32.

    Raises:
        KernelError: the kernel does not take these.
    """
    require("flash_attention", refuse_heads(q=q, k=k, v=v))
    out, lse = empty_by_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    batch, heads, queries, size = q.shape
    q, k, v = rows_adjacent(q), rows_adjacent(k), rows_adjacent(v)
    tile = forward_tile(size, q.dtype)
    launch(
        attention_forward_kernel,
        grid_of(queries, "BLOCK_M", batch * heads),
        q.device,
        *(q, k, v, out, lse, heads, heads // k.shape[1], queries, k.shape[2]),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(query_offset, key_offset, scale * _LOG2_E),
        CAUSAL=is_causal,
        SIZE=size,
        PRECISION=precision_of(attention_forward_kernel, q.dtype),
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        BLOCK_D=head_block(size),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out, lse


def grid_of(rows: int, block: str, heads: int) -> Callable[[Mapping[str, int]], tuple[int, int]]:
    """A grid of blocks of rows, and of heads."""
    return lambda blocks: (cdiv(rows, blocks[block]), heads)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    site: int,
    offset: Sequence[int],
    global_shape: Sequence[int],
) -> tuple[Tensor, Tensor]:
    require("triton_attention", refuse_extras(mask, dropout_p))
    out, lse = flash_attention(q, k, v, scale, is_causal=is_causal, query_offset=offset[2], key_offset=offset[3])
    return claimed(q, out), lse


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return empty_results(q, v)[0], q.new_empty(q.shape[:3], dtype=torch.float32)


CONSTANTS = "float dropout_p, bool is_causal, float scale, SymInt site, SymInt[] offset, SymInt[] global_shape"

triton_attention = define(
    "triton_attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? seed, {CONSTANTS}) -> (Tensor out, Tensor lse)",
    _attention,
    _attention_fake,
)


def forward_specimen(size: int) -> Specimen:
    """A compilation of the forward for heads of this size."""
    tile = forward_tile(size, torch.bfloat16)
    return block_specimen(
        attention_forward_kernel,
        "*bf16 *bf16 *bf16 *bf16 *fp32" + " i32" * 15 + " fp32",
        size,
        tile.num_warps,
        tile.num_stages,
        CAUSAL=True,
        SIZE=size,
        PRECISION="tf32",
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        BLOCK_D=head_block(size),
    )


KERNELS = (Kernel(attention, triton_attention, why_not_attention, tuple(map(forward_specimen, (64, 128, 256)))),)
