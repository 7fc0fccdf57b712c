"""Cross-entropy of each row in one pass over the logits, and a backward that may overwrite them.

The formulas are those of `cross_entropy.py`. The forward walks a row in blocks and keeps a running maximum m
and sum s of exp(x - m) (Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3):

    m' = max(m, max x),  s' = s exp(m - m') + sum_c exp(x_c - m'),  lse = m + log s

A target that is neither a class nor `ignore_index` gives NaN, in the loss and in the row's gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.cross_entropy import cross_entropy, cross_entropy_backward
from autoshard.kernels.kernel import SPECIMEN_COLUMNS, Kernel, specimen
from autoshard.kernels.launch import as_rows, launch, refuse_dtypes, require, row_tile
from autoshard.kernels.library import define

_MAX_BLOCK = 4096


@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr,
    target_ptr,
    loss_ptr,
    lse_ptr,
    rows,
    columns,
    logits_stride,
    ignore_index,
    smoothing,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """logits_ptr [rows, columns]; target_ptr [rows] int64; loss_ptr, lse_ptr [rows] float32.

    STEPS blocks of BLOCK_C cover the columns.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    target = tl.load(target_ptr + row, mask=row < rows, other=ignore_index)
    is_class = (target >= 0) & (target < columns)
    place = logits_ptr + row * logits_stride + target
    at_target = tl.load(place, mask=(row < rows) & is_class, other=float("nan"))
    maximum = tl.full((BLOCK_R,), -float("inf"), dtype=tl.float32)
    normaliser = tl.zeros((BLOCK_R,), dtype=tl.float32)
    total = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for step in range(STEPS):
        column = step * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        block = logits_ptr + row[:, None] * logits_stride + column[None, :]
        x = tl.load(block, mask=inside, other=-float("inf")).to(tl.float32)
        total += tl.sum(tl.where(inside, x, 0.0), axis=1)
        above = tl.maximum(maximum, tl.max(x, axis=1))
        # While a row has seen nothing but -inf, subtract 0: exp(-inf - 0) = 0, not NaN.
        base = tl.where(above == -float("inf"), 0.0, above)
        normaliser = normaliser * tl.exp(maximum - base) + tl.sum(tl.exp(x - base[:, None]), axis=1)
        maximum = above
    is_empty = normaliser == 0.0
    lse = tl.where(is_empty, -float("inf"), maximum + tl.log(tl.where(is_empty, 1.0, normaliser)))
    loss = lse - (1.0 - smoothing) * at_target.to(tl.float32)
    if smoothing > 0.0:
        loss -= smoothing * (total / columns)
    loss = tl.where(target == ignore_index, 0.0, loss)
    tl.store(loss_ptr + row, loss, mask=row < rows)
    tl.store(lse_ptr + row, lse, mask=row < rows)


@triton.jit
def cross_entropy_backward_kernel(
    grad_loss_ptr,
    logits_ptr,
    target_ptr,
    lse_ptr,
    grad_ptr,
    rows,
    columns,
    logits_stride,
    grad_stride,
    ignore_index,
    smoothing,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """grad_loss_ptr, target_ptr, lse_ptr [rows]; logits_ptr, grad_ptr [rows, columns], may be the same."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(logits_ptr + row[:, None] * logits_stride + column[None, :], mask=inside, other=-float("inf"))
    target = tl.load(target_ptr + row, mask=row < rows, other=ignore_index)
    lse = tl.load(lse_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    grad_loss = tl.load(grad_loss_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    is_class = (target >= 0) & (target < columns)
    grad_loss = tl.where(is_class, grad_loss, float("nan"))
    grad = tl.exp(x.to(tl.float32) - lse[:, None]) - smoothing / columns
    grad -= tl.where(column[None, :] == target[:, None], 1.0 - smoothing, 0.0)
    grad = tl.where((target == ignore_index)[:, None], 0.0, grad * grad_loss[:, None])
    tl.store(grad_ptr + row[:, None] * grad_stride + column[None, :], grad, mask=inside)


def cross_entropy_backward_into(
    grad: Tensor,
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    """The gradient of the logits into `grad` [N, C], which may be the logits themselves.

    Args:
        grad: [N, C], adjacent columns; overwritten.
        grad_loss, target, lse: [N], contiguous.
        logits: [N, C], adjacent columns.
        ignore_index, label_smoothing: the forward's.
    """
    rows, columns = logits.shape
    tile = row_tile(columns, _MAX_BLOCK)
    launch(
        cross_entropy_backward_kernel,
        (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns)),
        logits.device,
        *(grad_loss, logits, target, lse, grad, rows, columns, logits.stride(0), grad.stride(0)),
        *(ignore_index, label_smoothing),
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )


def why_not_cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> str | None:
    """Why the kernel cannot stand in for `autoshard::cross_entropy`, or None."""
    return refuse_dtypes(logits=logits)


def why_not_cross_entropy_backward(
    grad_loss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float
) -> str | None:
    """Why the kernel cannot stand in for `autoshard::cross_entropy_backward`, or None."""
    return refuse_dtypes(grad_loss=grad_loss, logits=logits, lse=lse)


def _cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    reason = why_not_cross_entropy(logits, target, ignore_index, label_smoothing)
    require("triton_cross_entropy", reason)
    loss, lse = _cross_entropy_fake(logits, target, ignore_index, label_smoothing)
    rows, columns = logits.shape
    x, tile = as_rows(logits, columns), row_tile(columns, _MAX_BLOCK)
    launch(
        cross_entropy_forward_kernel,
        (triton.cdiv(rows, tile.rows),),
        x.device,
        *(x, target.contiguous(), loss, lse, rows, columns, x.stride(0), ignore_index, label_smoothing),
        STEPS=triton.cdiv(columns, tile.columns),
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return loss, lse


def _cross_entropy_fake(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    loss, lse = (logits.new_empty((logits.shape[0],), dtype=torch.float32) for _ in range(2))
    return loss, lse


def _cross_entropy_backward(
    grad_loss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    arguments = (grad_loss, logits, target, lse, ignore_index, label_smoothing)
    require("triton_cross_entropy_backward", why_not_cross_entropy_backward(*arguments))
    grad = _cross_entropy_backward_fake(*arguments)
    rows = (grad_loss.contiguous(), as_rows(logits, logits.shape[1]), target.contiguous(), lse.contiguous())
    cross_entropy_backward_into(grad, *rows, ignore_index, label_smoothing)
    return grad


def _cross_entropy_backward_fake(
    grad_loss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    return logits.new_empty(logits.shape)


triton_cross_entropy = define(
    "triton_cross_entropy",
    "(Tensor logits, Tensor target, SymInt ignore_index, float label_smoothing) -> (Tensor loss, Tensor lse)",
    _cross_entropy,
    _cross_entropy_fake,
)
triton_cross_entropy_backward = define(
    "triton_cross_entropy_backward",
    "(Tensor grad_loss, Tensor logits, Tensor target, Tensor lse, SymInt ignore_index, float label_smoothing)"
    " -> Tensor",
    _cross_entropy_backward,
    _cross_entropy_backward_fake,
)

KERNELS = (
    Kernel(
        cross_entropy,
        triton_cross_entropy,
        why_not_cross_entropy,
        tuple(
            specimen(
                cross_entropy_forward_kernel,
                "*bf16 *i64 *fp32 *fp32 i32 i32 i32 i32 fp32",
                row_tile(columns, _MAX_BLOCK),
                columns,
                STEPS=triton.cdiv(columns, _MAX_BLOCK),
            )
            for columns in SPECIMEN_COLUMNS
        ),
    ),
    Kernel(
        cross_entropy_backward,
        triton_cross_entropy_backward,
        why_not_cross_entropy_backward,
        tuple(
            specimen(
                cross_entropy_backward_kernel,
                "*fp32 *bf16 *i64 *fp32 *bf16 i32 i32 i32 i32 i32 fp32",
                row_tile(columns, _MAX_BLOCK),
                columns,
            )
            for columns in SPECIMEN_COLUMNS
        ),
    ),
)
