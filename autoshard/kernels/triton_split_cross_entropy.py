"""`autoshard::split_cross_entropy` and its backward as Triton kernels, each of which reads the logits once.

They compute a rank's share of cross-entropy over a split vocabulary. The formulas are in `split_cross_entropy.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.launch import as_rows, cdiv, define_kernel, launch, over_pieces, over_rows, row_tile
from autoshard.kernels.split_cross_entropy import (
    ARGUMENTS,
    BACKWARD_ARGUMENTS,
    fake_backward,
    fake_forward,
    split_cross_entropy,
    split_cross_entropy_backward,
)
from autoshard.kernels.triton_activations import MAX_BLOCK, piece

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


def _refuse(
    logits: Tensor, factor: float = 0.0, correction: float = 0.0, shift: float = 0.0, **rows: Tensor
) -> str | None:
    shapes = {name: tuple(tensor.shape) for name, tensor in rows.items()}
    if logits.dim() != 2 or logits.numel() == 0 or any(x.numel() != len(logits) for x in rows.values()):
        return f"the kernel takes logits [N, C] and one number per row; found {tuple(logits.shape)}, {shapes}."
    wide = {name: x.dtype for name, x in rows.items() if x.is_floating_point()}
    narrow = {name: dtype for name, dtype in wide.items() if dtype != torch.float32}
    return f"the kernel takes {', '.join(wide)} in float32; found {narrow}." if narrow else None


def _fill(
    results: tuple[Tensor, Tensor], logits: Tensor, top: Tensor, indices: Tensor, elsewhere: Tensor, factor: float
) -> None:
    rows, columns = logits.shape
    x = as_rows(logits, columns)
    launch(
        split_cross_entropy_forward_kernel,
        over_rows(rows),
        logits.device,
        *(x, top.contiguous(), indices.contiguous(), _bytes(elsewhere), *results),
        *(rows, columns, x.stride(0), factor),
        follow=lambda blocks: {"STEPS": cdiv(columns, blocks["BLOCK_C"])},
        **row_tile(columns, _MAX_BLOCK).options,
    )


def _fill_backward(
    grad: Tensor, logits: Tensor, lse: Tensor, scale: Tensor, indices: Tensor, elsewhere: Tensor, is_ignored: Tensor,
    correction: float, shift: float,
) -> None:  # fmt: skip
    rows, columns = logits.shape
    x = as_rows(logits, columns)
    launch(
        split_cross_entropy_backward_kernel,
        over_pieces(rows, columns),
        logits.device,
        *(x, lse.contiguous(), scale.contiguous(), indices.contiguous(), _bytes(elsewhere), _bytes(is_ignored), grad),
        *(rows, columns, x.stride(0), correction, shift),
        **row_tile(columns, MAX_BLOCK).options,
    )


def _bytes(flags: Tensor) -> Tensor:
    """Return flags as contiguous int8, because not every version of Triton can load bools."""
    return flags.contiguous().view(torch.int8)


triton_split_cross_entropy = define_kernel(
    "triton_split_cross_entropy", ARGUMENTS, lambda **operands: fake_forward(*operands.values()), _fill, _refuse
)
triton_split_cross_entropy_backward = define_kernel(
    "triton_split_cross_entropy_backward",
    BACKWARD_ARGUMENTS,
    lambda **operands: fake_backward(*operands.values()),
    _fill_backward,
    _refuse,
)

KERNELS = {
    split_cross_entropy: triton_split_cross_entropy,
    split_cross_entropy_backward: triton_split_cross_entropy_backward,
}
