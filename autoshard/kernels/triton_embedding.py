"""Rows of a table by index, and the table's gradient; for a vocabulary that is split over ranks, each rank's part.

A rank holds rows first, ..., first + size - 1 of the whole table. With a_t the index of token t:

    forward:   out_t = table[a_t - first]; 0 where that row is another rank's
    backward:  dtable[v] = sum over tokens t with a_t = first + v, in ascending order of t, of dout_t

The backward sorts the indices (stably), so that the tokens of a row lie side by side: one program sums them in float32,
always in the same order, and stores the row once. Nothing is added atomically, and nothing is filled with zeros first.
An index that a whole table does not have gives NaN, never what lies behind the table.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.kernel import SPECIMEN_COLUMNS, Form, FusedKernel, Kernel, block_specimen, specimen
from autoshard.kernels.launch import as_rows, cdiv, launch, over_pieces, refuse_dtypes, require
from autoshard.kernels.library import define
from autoshard.kernels.triton_activations import piece, piece_tile

_aten = torch.ops.aten
_INDICES = (torch.int64, torch.int32)
# Rows of one index that a program reads at once.
_BLOCK_R = 4
_NUM_WARPS = 4


@triton.jit
def embedding_kernel(
    table_ptr,
    indices_ptr,
    out_ptr,
    rows,
    columns,
    table_stride,
    first,
    size,
    outside,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """table_ptr [size or more, columns]; indices_ptr [rows]; out_ptr [rows, columns] contiguous. Where an index is not
    among first, ..., first + size - 1, the row is `outside`."""
    row, column, inside = piece(rows, columns, BLOCK_R, BLOCK_C)
    index = tl.load(indices_ptr + row, mask=row < rows, other=0).to(tl.int64) - first
    is_here = (index >= 0) & (index < size)
    x = tl.load(table_ptr + index * table_stride + column, mask=inside & is_here, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + column, tl.where(is_here, x, outside), mask=inside)


@triton.jit
def embedding_backward_kernel(
    grad_ptr,
    order_ptr,
    starts_ptr,
    table_grad_ptr,
    columns,
    grad_stride,
    padding,
    SCALE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """grad_ptr [tokens, columns]; order_ptr [tokens] int64, the tokens by ascending index; starts_ptr [V + 1] int64,
    where the tokens of each row begin in that order; table_grad_ptr [V, columns] contiguous. Row `padding` gets 0.
    SCALE divides by the number of tokens. Programs: V, then blocks of columns."""
    table_row = tl.program_id(0).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    start = tl.load(starts_ptr + table_row)
    end = tl.load(starts_ptr + table_row + 1)
    last = tl.where(table_row == padding, start, end)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for begin in range(start, last, BLOCK_R):
        place = (begin + tl.arange(0, BLOCK_R))[:, None]
        token = tl.load(order_ptr + place, mask=place < last, other=0)
        inside = (place < last) & (column < columns)
        total += tl.load(grad_ptr + token * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    summed = tl.sum(total, axis=0, keep_dims=True)
    if SCALE:
        summed = summed / tl.maximum(end - start, 1).to(tl.float32)
    tl.store(table_grad_ptr + table_row * columns + column, summed, mask=column < columns)


def why_not_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> str | None:
    """Why the kernel cannot stand in for `aten::embedding`, or None."""
    return _refuse(weight, indices)


def why_not_embedding_backward(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> str | None:
    """Why the kernel cannot stand in for `aten::embedding_dense_backward`, or None."""
    if grad_output.shape[:-1] != indices.shape:
        return f"grad_output and indices do not fit: {tuple(grad_output.shape)} and {tuple(indices.shape)}."
    return _refuse(grad_output, indices)


def why_not_split_embedding(weight: Tensor, indices: Tensor, first: int, size: int) -> str | None:
    """Why the kernel does not take these, or None."""
    if size > weight.shape[0]:
        return f"size={size} is more than the {weight.shape[0]} rows of the table."
    return _refuse(weight, indices)


def why_not_split_embedding_backward(
    grad_output: Tensor, indices: Tensor, first: int, size: int, num_weights: int, padding_idx: int
) -> str | None:
    """Why the kernel does not take these, or None."""
    return why_not_embedding_backward(grad_output, indices, num_weights, padding_idx, False)


def _refuse(rows: Tensor, indices: Tensor) -> str | None:
    if rows.shape[-1] == 0:
        return f"the kernel takes rows of at least one element; found {tuple(rows.shape)}."
    if indices.dtype not in _INDICES:
        return f"the kernel takes indices in int64 or int32; found {indices.dtype}."
    return refuse_dtypes(rows=rows)


def _embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    require("triton_embedding", why_not_embedding(weight, indices))
    return _look_up(weight, indices, 0, weight.shape[0], float("nan"))


def _split_embedding(weight: Tensor, indices: Tensor, first: int, size: int) -> Tensor:
    require("triton_split_embedding", why_not_split_embedding(weight, indices, first, size))
    return _look_up(weight, indices, first, size, 0.0)


def _look_up(weight: Tensor, indices: Tensor, first: int, size: int, outside: float) -> Tensor:
    out = _embedding_fake(weight, indices)
    rows, columns = indices.numel(), weight.shape[1]
    table, tile = as_rows(weight, columns), piece_tile(columns)
    launch(
        embedding_kernel,
        over_pieces(rows, columns),
        weight.device,
        *(table, indices.contiguous(), out, rows, columns, table.stride(0), first, size, outside),
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return out


def _embedding_fake(weight: Tensor, indices: Tensor, *_: object) -> Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _embedding_backward(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    arguments = (grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
    require("triton_embedding_backward", why_not_embedding_backward(*arguments))
    return sum_rows(grad_output, indices, 0, num_weights, num_weights, padding_idx, scale_grad_by_freq)


def _split_embedding_backward(
    grad_output: Tensor, indices: Tensor, first: int, size: int, num_weights: int, padding_idx: int
) -> Tensor:
    arguments = (grad_output, indices, first, size, num_weights, padding_idx)
    require("triton_split_embedding_backward", why_not_split_embedding_backward(*arguments))
    return sum_rows(*arguments, scale=False)


def tokens_by_row(indices: Tensor, first: int, size: int, rows: int) -> tuple[Tensor, Tensor]:
    """The tokens by ascending index, and where in that order those of each row begin.

    Args:
        indices: of the tokens, any shape.
        first, size: row v < size has the tokens with index first + v; rows behind have none.
        rows: how many there are.

    Returns:
        [tokens] and [rows + 1], int64.
    """
    ordered, order = torch.sort(indices.reshape(-1), stable=True)
    row_indices = torch.arange(rows + 1, device=indices.device, dtype=indices.dtype).clamp(max=size) + first
    return order, torch.searchsorted(ordered, row_indices)


def sum_rows(
    grad_output: Tensor, indices: Tensor, first: int, size: int, num_weights: int, padding_idx: int, scale: bool
) -> Tensor:
    """The table's gradient [num_weights, columns], of which `size` rows from `first` on may have tokens."""
    columns = grad_output.shape[-1]
    out = grad_output.new_empty((num_weights, columns))
    grad, block = as_rows(grad_output, columns), piece_tile(columns).columns
    launch(
        embedding_backward_kernel,
        lambda blocks: (num_weights, cdiv(columns, blocks["BLOCK_C"])),
        grad.device,
        *(grad, *tokens_by_row(indices, first, size, num_weights), out, columns, grad.stride(0)),
        padding_idx - first if padding_idx >= 0 else -1,
        SCALE=scale,
        BLOCK_R=_BLOCK_R,
        BLOCK_C=block,
        num_warps=_NUM_WARPS,
    )
    return out


def _embedding_backward_fake(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    return grad_output.new_empty((num_weights, grad_output.shape[-1]))


def _split_embedding_backward_fake(
    grad_output: Tensor, indices: Tensor, first: int, size: int, num_weights: int, padding_idx: int
) -> Tensor:
    return grad_output.new_empty((num_weights, grad_output.shape[-1]))


embedding = define(
    "triton_embedding",
    "(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False) "
    "-> Tensor",
    _embedding,
    _embedding_fake,
)
embedding_backward = define(
    "triton_embedding_backward",
    "(Tensor grad_output, Tensor indices, SymInt num_weights, SymInt padding_idx, bool scale_grad_by_freq) -> Tensor",
    _embedding_backward,
    _embedding_backward_fake,
)
split_embedding = define(
    "triton_split_embedding",
    "(Tensor weight, Tensor indices, SymInt first, SymInt size) -> Tensor",
    _split_embedding,
    _embedding_fake,
)
split_embedding_backward = define(
    "triton_split_embedding_backward",
    "(Tensor grad_output, Tensor indices, SymInt first, SymInt size, SymInt num_weights, SymInt padding_idx) -> Tensor",
    _split_embedding_backward,
    _split_embedding_backward_fake,
)


def _local(indices: Any, first: Any, size: Any) -> tuple[Any, Any]:
    """Indices into the rank's rows, 0 for those of other ranks, and where they are of other ranks."""
    local = _aten.sub.Tensor(indices, first)
    elsewhere = _aten.bitwise_or.Tensor(_aten.lt.Scalar(local, 0), _aten.ge.Scalar(local, size))
    return _aten.masked_fill.Scalar(local, elsewhere, 0), elsewhere


def _forward(like: Tensor, weight: Any, indices: Any, first: Any, size: Any) -> Any:
    local, elsewhere = _local(indices, first, size)
    rows = _aten.embedding.default(weight, local)
    return _aten.masked_fill.Scalar(rows, _aten.unsqueeze.default(elsewhere, -1), 0)


def _padded_backward(like: Tensor, grad_output: Any, indices: Any, first: Any, size: Any, padding_idx: Any) -> Any:
    local, skipped = _local(indices, first, size)
    if padding_idx is not None:
        skipped = _aten.bitwise_or.Tensor(skipped, _aten.eq.Scalar(indices, padding_idx))
    grad = _aten.masked_fill.Scalar(grad_output, _aten.unsqueeze.default(skipped, -1), 0)
    return _aten.embedding_dense_backward.default(grad, local, like.shape[0], -1, False)


def _backward(like: Tensor, grad_output: Any, indices: Any, first: Any, size: Any) -> Any:
    return _padded_backward(like, grad_output, indices, first, size, None)


_FORWARD_SPECIMENS = tuple(
    specimen(embedding_kernel, "*bf16 *i64 *bf16 i32 i32 i32 i32 i32 fp32", piece_tile(columns), columns)
    for columns in SPECIMEN_COLUMNS
)
_BACKWARD_SPECIMENS = tuple(
    block_specimen(
        embedding_backward_kernel,
        "*bf16 *i64 *i64 *bf16 i32 i32 i32",
        columns,
        _NUM_WARPS,
        SCALE=False,
        BLOCK_R=_BLOCK_R,
        BLOCK_C=piece_tile(columns).columns,
    )
    for columns in SPECIMEN_COLUMNS
)

KERNELS = (
    Kernel(_aten.embedding.default, embedding, why_not_embedding, _FORWARD_SPECIMENS),
    Kernel(_aten.embedding_dense_backward.default, embedding_backward, why_not_embedding_backward, _BACKWARD_SPECIMENS),
)
FUSED = (
    FusedKernel(
        split_embedding_backward,
        why_not_split_embedding_backward,
        (
            Form(_padded_backward, lambda like: {"num_weights": like.shape[0]}, dims=2),
            Form(_backward, lambda like: {"num_weights": like.shape[0], "padding_idx": -1}, dims=2),
        ),
        (),
    ),
    FusedKernel(split_embedding, why_not_split_embedding, (Form(_forward),), ()),
)
