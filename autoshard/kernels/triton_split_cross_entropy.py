"""`autoshard::split_cross_entropy` and its backward as Triton kernels, each of which reads the logits once.

They compute a rank's share of cross-entropy over a split vocabulary. The formulas are in `split_cross_entropy.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.kernel import EXAMPLE_COLUMNS, Kernel, example
from autoshard.kernels.launch import as_rows, cdiv, launch, over_pieces, over_rows, refuse_dtypes, require, row_tile
from autoshard.kernels.library import define
from autoshard.kernels.split_cross_entropy import (
    ARGUMENTS,
    BACKWARD_ARGUMENTS,
    fake_backward,
    fake_forward,
    split_cross_entropy,
    split_cross_entropy_backward,
)
from autoshard.kernels.triton_activations import piece, piece_tile

_MAX_BLOCK = 4096


@triton.jit
def split_cross_entropy_forward_kernel(
    logits_ptr,
    top_ptr,
    indices_ptr,
    elsewhere_ptr,
    total_ptr,
    expected_ptr,
    rows,
    columns,
    logits_stride,
    factor,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the sums of exponentials and the targets' logits of BLOCK_R rows.

    The logits logits_ptr are [rows, columns]. The vectors top_ptr, total_ptr and expected_ptr [rows] are float32. The
    targets indices_ptr [rows] are int64, within the columns. The flags elsewhere_ptr [rows] are int8. STEPS blocks of
    BLOCK_C cover the columns.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < rows
    top = tl.load(top_ptr + row, mask=is_row, other=0.0)
    total = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for step in range(STEPS):
        column = step * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = is_row[:, None] & (column < columns)[None, :]
        block = logits_ptr + row[:, None] * logits_stride + column[None, :]
        x = tl.load(block, mask=inside, other=-float("inf")).to(tl.float32)
        total += tl.sum(tl.exp(x - top[:, None]), axis=1)
    index = tl.load(indices_ptr + row, mask=is_row, other=0)
    is_here = is_row & (tl.load(elsewhere_ptr + row, mask=is_row, other=1) == 0)
    picked = tl.load(logits_ptr + row * logits_stride + index, mask=is_here, other=0.0).to(tl.float32)
    tl.store(total_ptr + row, total, mask=is_row)
    tl.store(expected_ptr + row, picked * factor, mask=is_row)


@triton.jit
def split_cross_entropy_backward_kernel(
    logits_ptr,
    lse_ptr,
    scale_ptr,
    indices_ptr,
    elsewhere_ptr,
    ignored_ptr,
    grad_ptr,
    rows,
    columns,
    logits_stride,
    correction,
    shift,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute a tile of the gradient of the logits.

    The matrices logits_ptr and grad_ptr are [rows, columns], the last contiguous. The vectors lse_ptr and scale_ptr
    [rows] are float32. The targets indices_ptr [rows] are int64, within the columns. The flags elsewhere_ptr and
    ignored_ptr [rows] are int8.
    """
    row, column, inside = piece(rows, columns, BLOCK_R, BLOCK_C)
    x = tl.load(logits_ptr + row * logits_stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    lse = tl.load(lse_ptr + row, mask=row < rows, other=0.0)
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    index = tl.load(indices_ptr + row, mask=row < rows, other=0)
    is_here = tl.load(elsewhere_ptr + row, mask=row < rows, other=1) == 0
    is_counted = tl.load(ignored_ptr + row, mask=row < rows, other=1) == 0
    grad = (tl.exp(x - lse) - shift) * scale
    grad += tl.where((column == index) & is_here, correction * scale, 0.0)
    tl.store(grad_ptr + row * columns + column, tl.where(is_counted, grad, 0.0), mask=inside)


def why_not_split_cross_entropy(
    logits: Tensor, top: Tensor, indices: Tensor, elsewhere: Tensor, factor: float
) -> str | None:
    """Return why `triton_split_cross_entropy` cannot take these operands, or None if it can."""
    return _refuse(logits, {"top": top, "indices": indices, "elsewhere": elsewhere}, {"top": top})


def why_not_split_cross_entropy_backward(
    logits: Tensor,
    lse: Tensor,
    scale: Tensor,
    indices: Tensor,
    elsewhere: Tensor,
    is_ignored: Tensor,
    correction: float,
    shift: float,
) -> str | None:
    """Return why `triton_split_cross_entropy_backward` cannot take these operands, or None if it can."""
    rows = {"lse": lse, "scale": scale, "indices": indices, "elsewhere": elsewhere, "is_ignored": is_ignored}
    return _refuse(logits, rows, {"lse": lse, "scale": scale})


def _refuse(logits: Tensor, rows: dict[str, Tensor], wide: dict[str, Tensor]) -> str | None:
    reason = refuse_dtypes(logits=logits)
    shapes = {name: tuple(tensor.shape) for name, tensor in rows.items()}
    if reason is None and (
        logits.dim() != 2 or logits.numel() == 0 or any(x.numel() != len(logits) for x in rows.values())
    ):
        return f"the kernel takes logits [N, C] and one number per row; found {tuple(logits.shape)}, {shapes}."
    narrow = {name: tensor.dtype for name, tensor in wide.items() if tensor.dtype != torch.float32}
    return reason or (f"the kernel takes {', '.join(wide)} in float32; found {narrow}." if narrow else None)


def _split_cross_entropy(
    logits: Tensor, top: Tensor, indices: Tensor, elsewhere: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    require("triton_split_cross_entropy", why_not_split_cross_entropy(logits, top, indices, elsewhere, factor))
    total, expected = fake_forward(logits, top, indices, elsewhere, factor)
    rows, columns = logits.shape
    x, tile = as_rows(logits, columns), row_tile(columns, _MAX_BLOCK)
    launch(
        split_cross_entropy_forward_kernel,
        over_rows(rows),
        logits.device,
        *(x, top.contiguous(), indices.contiguous(), _bytes(elsewhere), total, expected),
        *(rows, columns, x.stride(0), factor),
        follow=lambda blocks: {"STEPS": cdiv(columns, blocks["BLOCK_C"])},
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return total, expected


def _split_cross_entropy_backward(
    logits: Tensor,
    lse: Tensor,
    scale: Tensor,
    indices: Tensor,
    elsewhere: Tensor,
    is_ignored: Tensor,
    correction: float,
    shift: float,
) -> Tensor:
    arguments = (logits, lse, scale, indices, elsewhere, is_ignored, correction, shift)
    require("triton_split_cross_entropy_backward", why_not_split_cross_entropy_backward(*arguments))
    grad = fake_backward(*arguments)
    rows, columns = logits.shape
    x, tile = as_rows(logits, columns), piece_tile(columns)
    launch(
        split_cross_entropy_backward_kernel,
        over_pieces(rows, columns),
        logits.device,
        *(x, lse.contiguous(), scale.contiguous(), indices.contiguous(), _bytes(elsewhere), _bytes(is_ignored), grad),
        *(rows, columns, x.stride(0), correction, shift),
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return grad


def _bytes(flags: Tensor) -> Tensor:
    """Return flags as contiguous int8, because not every version of Triton can load bools."""
    return flags.contiguous().view(torch.int8)


triton_split_cross_entropy = define("triton_split_cross_entropy", ARGUMENTS, _split_cross_entropy, fake_forward)
triton_split_cross_entropy_backward = define(
    "triton_split_cross_entropy_backward", BACKWARD_ARGUMENTS, _split_cross_entropy_backward, fake_backward
)


KERNELS = (
    Kernel(
        split_cross_entropy_backward,
        triton_split_cross_entropy_backward,
        why_not_split_cross_entropy_backward,
        tuple(
            example(
                split_cross_entropy_backward_kernel,
                "*bf16 *fp32 *fp32 *i64 *i8 *i8 *bf16 i32 i32 i32 fp32 fp32",
                piece_tile(columns),
                columns,
            )
            for columns in EXAMPLE_COLUMNS
        ),
    ),
    Kernel(
        split_cross_entropy,
        triton_split_cross_entropy,
        why_not_split_cross_entropy,
        tuple(
            example(
                split_cross_entropy_forward_kernel,
                "*bf16 *fp32 *i64 *i8 *fp32 *fp32 i32 i32 i32 fp32",
                row_tile(columns, _MAX_BLOCK),
                columns,
                STEPS=triton.cdiv(columns, _MAX_BLOCK),
            )
            for columns in EXAMPLE_COLUMNS
        ),
    ),
)
