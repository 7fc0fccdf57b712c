"""Tokens to the order of experts and back, around products in groups (`aten::_grouped_mm`).

Gale et al., "MegaBlocks" (2022), section 5.3. Each of T tokens goes to k experts; assignment t k + j is token t's j-th.
`order` [T k] has the assignments by expert, `inverse` [T k] the place of each assignment among them, `shares` [T k] the
weight of each place. With x [T, H] the tokens and y [T k, H] what the experts make of them:

    permute:   out[r] = x[order[r] // k]
    backward:  dx[t] = sum over r with order[r] // k = t of dout[r]
    combine:   out[t] = sum over j of shares[p] y[p], p = inverse[t k + j]
    backward:  g[p] = sum over assignments s with inverse[s] = p of dout[s // k]
               dy[p] = shares[p] g[p],    dshares[p] = sum over the features of g[p] y[p]

Both backwards are right for any indices, not for permutations alone: they go by what they sort (`tokens_by_row`), and
always sum in the same order. A place that there is not gives NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.kernel import SPECIMEN_COLUMNS, Form, FusedKernel, specimen
from autoshard.kernels.launch import (
    as_rows,
    launch,
    over_pieces,
    over_rows,
    refuse_columns,
    refuse_dtypes,
    require,
    row_tile,
)
from autoshard.kernels.library import define
from autoshard.kernels.triton_activations import piece, piece_tile
from autoshard.kernels.triton_embedding import sum_rows, tokens_by_row

_aten = torch.ops.aten


@triton.jit
def permute_kernel(
    x_ptr,
    order_ptr,
    out_ptr,
    rows,
    columns,
    tokens,
    count,
    x_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """x_ptr [tokens, columns]; order_ptr [rows] int64; out_ptr [rows, columns] contiguous; count is k."""
    row, column, inside = piece(rows, columns, BLOCK_R, BLOCK_C)
    assignment = tl.load(order_ptr + row, mask=row < rows, other=0)
    token = assignment // count
    is_token = (assignment >= 0) & (token < tokens)
    x = tl.load(x_ptr + token * x_stride + column, mask=inside & is_token, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + column, tl.where(is_token, x, float("nan")), mask=inside)


@triton.jit
def combine_kernel(
    y_ptr,
    shares_ptr,
    inverse_ptr,
    out_ptr,
    tokens,
    columns,
    count,
    y_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """y_ptr [tokens count, columns]; shares_ptr [tokens count]; inverse_ptr [tokens count] int64; out_ptr [tokens,
    columns] contiguous."""
    row, column, inside = piece(tokens, columns, BLOCK_R, BLOCK_C)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for chosen in range(count):
        place = tl.load(inverse_ptr + row * count + chosen, mask=row < tokens, other=0)
        is_place = (place >= 0) & (place < tokens * count)
        share = tl.load(shares_ptr + place, mask=is_place, other=float("nan")).to(tl.float32)
        y = tl.load(y_ptr + place * y_stride + column, mask=inside & is_place, other=0.0).to(tl.float32)
        total += share * y
    tl.store(out_ptr + row * columns + column, total, mask=inside)


@triton.jit
def combine_backward_kernel(
    grad_ptr,
    y_ptr,
    shares_ptr,
    assignments_ptr,
    starts_ptr,
    y_grad_ptr,
    shares_grad_ptr,
    rows,
    columns,
    count,
    grad_stride,
    y_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """grad_ptr [tokens, columns]; y_ptr, y_grad_ptr [rows, columns], the last contiguous; shares_ptr, shares_grad_ptr
    [rows]; assignments_ptr [tokens count] int64, by the place that they have; starts_ptr [rows + 1] int64, where those
    of each place begin."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    is_row, is_column = row < rows, column < columns
    start = tl.load(starts_ptr + row, mask=is_row, other=0)
    end = tl.load(starts_ptr + row + 1, mask=is_row, other=0)
    grad = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for step in range(tl.max(end - start)):  # pyright: ignore[reportArgumentType]
        is_there = start + step < end
        token = tl.load(assignments_ptr + start + step, mask=is_there, other=0) // count
        source = grad_ptr + token * grad_stride + column
        grad += tl.load(source, mask=is_there & is_column, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + column, mask=is_row & is_column, other=0.0).to(tl.float32)
    share = tl.load(shares_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(y_grad_ptr + row * columns + column, share * grad, mask=is_row & is_column)
    tl.store(shares_grad_ptr + row, tl.sum(grad * y, axis=1, keep_dims=True), mask=is_row)


def why_not_permute(x: Tensor, order: Tensor, count: int) -> str | None:
    """Why the kernel does not take these, or None."""
    if x.dim() != 2 or x.shape[1] == 0 or order.shape != (len(x) * count,):
        return f"the kernel takes x [T, H] and order [T k]; found {tuple(x.shape)}, {tuple(order.shape)}, k={count}."
    return _refuse_indices(order) or refuse_dtypes(x=x)


def why_not_permute_backward(grad: Tensor, order: Tensor, count: int, tokens: int) -> str | None:
    """Why the kernel does not take these, or None."""
    if grad.dim() != 2 or grad.shape[1] == 0 or order.shape != (len(grad),):
        return f"the kernel takes grad [T k, H] and order [T k]; found {tuple(grad.shape)}, {tuple(order.shape)}."
    return _refuse_indices(order) or refuse_dtypes(grad=grad)


def why_not_combine(y: Tensor, shares: Tensor, inverse: Tensor, count: int) -> str | None:
    """Why the kernel does not take these, or None."""
    if y.dim() != 2 or not shares.shape == inverse.shape == (len(y),) or len(y) % count:
        shapes = f"{tuple(y.shape)}, {tuple(shares.shape)}, {tuple(inverse.shape)}, k={count}"
        return f"the kernel takes y [T k, H], shares and inverse [T k]; found {shapes}."
    return _refuse_indices(inverse) or refuse_columns(y.shape[1]) or refuse_dtypes(y=y, shares=shares)


def why_not_combine_backward(grad: Tensor, y: Tensor, shares: Tensor, inverse: Tensor, count: int) -> str | None:
    """Why the kernel does not take these, or None."""
    reason = why_not_combine(y, shares, inverse, count) or refuse_dtypes(grad=grad)
    if reason is None and grad.shape != (len(y) // count, y.shape[1]):
        return f"the kernel takes grad [T, H] for y [T k, H]; found {tuple(grad.shape)}, {tuple(y.shape)}, k={count}."
    return reason


def _refuse_indices(indices: Tensor) -> str | None:
    return None if indices.dtype == torch.int64 else f"the kernel takes indices in int64; found {indices.dtype}."


def _permute(x: Tensor, order: Tensor, count: int) -> Tensor:
    require("triton_permute", why_not_permute(x, order, count))
    out = _permute_fake(x, order, count)
    (rows, columns), source = out.shape, as_rows(x, x.shape[1])
    tile = piece_tile(columns)
    launch(
        permute_kernel,
        over_pieces(rows, columns),
        x.device,
        *(source, order.contiguous(), out, rows, columns, len(x), count, source.stride(0)),
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return out


def _permute_fake(x: Tensor, order: Tensor, count: int) -> Tensor:
    return x.new_empty((len(order), x.shape[1]))


def _permute_backward(grad: Tensor, order: Tensor, count: int, tokens: int) -> Tensor:
    require("triton_permute_backward", why_not_permute_backward(grad, order, count, tokens))
    return sum_rows(grad, order // count, 0, tokens, tokens, -1, scale=False)


def _permute_backward_fake(grad: Tensor, order: Tensor, count: int, tokens: int) -> Tensor:
    return grad.new_empty((tokens, grad.shape[1]))


def _combine(y: Tensor, shares: Tensor, inverse: Tensor, count: int) -> Tensor:
    require("triton_combine", why_not_combine(y, shares, inverse, count))
    out = _combine_fake(y, shares, inverse, count)
    (tokens, columns), source = out.shape, as_rows(y, y.shape[1])
    tile = piece_tile(columns)
    launch(
        combine_kernel,
        over_pieces(tokens, columns),
        y.device,
        *(source, shares.contiguous(), inverse.contiguous(), out, tokens, columns, count, source.stride(0)),
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return out


def _combine_fake(y: Tensor, shares: Tensor, inverse: Tensor, count: int) -> Tensor:
    return y.new_empty((len(y) // count, y.shape[1]))


def _combine_backward(grad: Tensor, y: Tensor, shares: Tensor, inverse: Tensor, count: int) -> tuple[Tensor, Tensor]:
    require("triton_combine_backward", why_not_combine_backward(grad, y, shares, inverse, count))
    y_grad, shares_grad = _combine_backward_fake(grad, y, shares, inverse, count)
    rows, columns = y.shape
    grad, y, tile = as_rows(grad, columns), as_rows(y, columns), row_tile(columns)
    launch(
        combine_backward_kernel,
        over_rows(rows),
        y.device,
        *(grad, y, shares.contiguous(), *tokens_by_row(inverse, 0, rows, rows), y_grad, shares_grad),
        *(rows, columns, count, grad.stride(0), y.stride(0)),
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return y_grad, shares_grad


def _combine_backward_fake(
    grad: Tensor, y: Tensor, shares: Tensor, inverse: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), shares.new_empty((len(y), 1))


permute = define("triton_permute", "(Tensor x, Tensor order, SymInt count) -> Tensor", _permute, _permute_fake)
permute_backward = define(
    "triton_permute_backward",
    "(Tensor grad, Tensor order, SymInt count, SymInt tokens) -> Tensor",
    _permute_backward,
    _permute_backward_fake,
)
combine = define(
    "triton_combine",
    "(Tensor y, Tensor shares, Tensor inverse, SymInt count) -> Tensor",
    _combine,
    _combine_fake,
)
combine_backward = define(
    "triton_combine_backward",
    "(Tensor grad, Tensor y, Tensor shares, Tensor inverse, SymInt count) -> (Tensor y_grad, Tensor shares_grad)",
    _combine_backward,
    _combine_backward_fake,
)


def _gathered(like: Tensor, x: Any, order: Any, count: Any) -> Any:
    return _aten.index.Tensor(x, [_aten.floor_divide.default(order, count)])


def _scattered(like: Tensor, grad: Any, order: Any, count: Any) -> Any:
    places = _aten.floor_divide.default(order, count)
    return _aten.index_put.default(_zeros(like, grad, like.dtype), [places], grad, True)


def _zeros(like: Tensor, grad: Any, dtype: torch.dtype) -> Any:
    return _aten.new_zeros.default(grad, list(like.shape), dtype=dtype, layout=torch.strided, device=like.device)


def _weighed(like: Tensor, y: Any, shares: Any, inverse: Any, count: Any) -> Any:
    weighed = _aten.mul.Tensor(y, _aten.unsqueeze.default(shares, -1))
    chosen = _aten.reshape.default(_aten.index.Tensor(weighed, [inverse]), [like.shape[0], count, like.shape[1]])
    return _aten.sum.dim_IntList(chosen, [1])


def _weighed_wide(like: Tensor, y: Any, shares: Any, inverse: Any, count: Any) -> Any:
    """With shares in float32, and rounded at the end."""
    return _aten._to_copy.default(_weighed(like, y, shares, inverse, count), dtype=like.dtype)


def _weighed_backward(
    like: Tensor, grad: Any, y: Any, shares: Any, inverse: Any, count: Any, tokens: Any
) -> tuple[Any, Any]:
    return _weighed_gradients(like, grad, y, shares, inverse, count, tokens, like.dtype)


def _weighed_wide_backward(
    like: Tensor, grad: Any, y: Any, shares: Any, inverse: Any, count: Any, tokens: Any
) -> tuple[Any, Any]:
    wide = _aten._to_copy.default(grad, dtype=torch.float32, layout=torch.strided, device=like.device)
    y_grad, shares_grad = _weighed_gradients(like, wide, y, shares, inverse, count, tokens, torch.float32)
    return _aten._to_copy.default(y_grad, dtype=like.dtype), shares_grad


def _weighed_gradients(
    like: Tensor, grad: Any, y: Any, shares: Any, inverse: Any, count: Any, tokens: Any, dtype: torch.dtype
) -> tuple[Any, Any]:
    spread = _aten.expand.default(_aten.unsqueeze.default(grad, 1), [tokens, count, like.shape[1]])
    spread = _aten.clone.default(spread, memory_format=torch.contiguous_format)
    spread = _aten.reshape.default(spread, list(like.shape))
    placed = _aten.index_put.default(_zeros(like, spread, dtype), [inverse], spread, True)
    shares_grad = _aten.sum.dim_IntList(_aten.mul.Tensor(placed, y), [1], True)
    return _aten.mul.Tensor(placed, _aten.unsqueeze.default(shares, -1)), shares_grad


_TOKENS = {"tokens": lambda arguments: arguments["grad"].shape[0]}

FUSED = (
    FusedKernel(
        combine_backward,
        why_not_combine_backward,
        (Form(_weighed_wide_backward, free=_TOKENS, dims=2), Form(_weighed_backward, free=_TOKENS, dims=2)),
        tuple(
            specimen(
                combine_backward_kernel,
                "*bf16 *bf16 *fp32 *i64 *i64 *bf16 *fp32 i32 i32 i32 i32 i32",
                row_tile(columns),
                columns,
            )
            for columns in SPECIMEN_COLUMNS
        ),
    ),
    FusedKernel(
        combine,
        why_not_combine,
        (Form(_weighed_wide, dims=2), Form(_weighed, dims=2)),
        tuple(
            specimen(combine_kernel, "*bf16 *fp32 *i64 *bf16 i32 i32 i32 i32", piece_tile(columns), columns)
            for columns in SPECIMEN_COLUMNS
        ),
    ),
    FusedKernel(
        permute_backward,
        why_not_permute_backward,
        (Form(_scattered, lambda like: {"tokens": like.shape[0]}, dims=2),),
        (),
    ),
    FusedKernel(
        permute,
        why_not_permute,
        (Form(_gathered, dims=2),),
        tuple(
            specimen(permute_kernel, "*bf16 *i64 *bf16 i32 i32 i32 i32 i32", piece_tile(columns), columns)
            for columns in SPECIMEN_COLUMNS
        ),
    ),
)
