"""RMS norm, forward and backward, each reading its input once.

Zhang, Sennrich, "Root mean square layer normalization" (NeurIPS 2019); formulas as in `rms_norm.py`:

    rstd = 1 / sqrt(mean_c x_c^2 + eps),  n = x rstd,  out = n w
    dx   = rstd (g - n mean_c(g n)) with g = dout w,   dw = sum over rows of dout n

The backward's programs each walk many rows and keep one partial dw; these are summed at the end, in a fixed
order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.kernel import SPECIMEN_COLUMNS, Kernel, specimen
from autoshard.kernels.launch import (
    SUMMING_PROGRAMS,
    as_rows,
    launch,
    refuse_columns,
    refuse_dtypes,
    require,
    row_tile,
)
from autoshard.kernels.library import define


@triton.jit
def rms_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rstd_ptr,
    rows,
    columns,
    x_stride,
    out_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """x_ptr, out_ptr [rows, columns]; weight_ptr [columns]; rstd_ptr [rows] float32."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / columns + eps)
    out = x * rstd[:, None]
    if HAS_WEIGHT:
        out *= tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + row[:, None] * out_stride + column[None, :], out, mask=inside)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def rms_norm_backward_kernel(
    grad_out_ptr,
    x_ptr,
    rstd_ptr,
    weight_ptr,
    grad_ptr,
    grad_weight_ptr,
    rows,
    columns,
    grad_out_stride,
    x_stride,
    grad_stride,
    HAS_WEIGHT: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    HAS_GRAD_WEIGHT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """grad_out_ptr, x_ptr, grad_ptr [rows, columns]; rstd_ptr [rows]; weight_ptr [columns];
    grad_weight_ptr [programs, columns] float32: program i sums row blocks i, i + programs, ..."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_C)
    weight = tl.full((BLOCK_C,), 1.0, dtype=tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for step in range(STEPS):
        block = program.to(tl.int64) + step * tl.num_programs(0)
        row = block * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        grad_out = tl.load(grad_out_ptr + row[:, None] * grad_out_stride + column[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        normed = x.to(tl.float32) * rstd
        if HAS_GRAD:
            weighted = grad_out * weight[None, :]
            projection = tl.sum(weighted * normed, axis=1, keep_dims=True) / columns
            grad = rstd * (weighted - normed * projection)
            tl.store(grad_ptr + row[:, None] * grad_stride + column[None, :], grad, mask=inside)
        grad_weight += tl.sum(grad_out * normed, axis=0)
    if HAS_GRAD_WEIGHT:
        partial = program.to(tl.int64) * columns + column
        tl.store(grad_weight_ptr + partial, grad_weight, mask=column < columns)


def why_not_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> str | None:
    """Why the kernel cannot stand in for `aten::_fused_rms_norm`, or None."""
    return refuse_dtypes(input=input, weight=weight) or refuse_columns(math.prod(normalized_shape))


def why_not_rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> str | None:
    """Why the kernel cannot stand in for `aten::_fused_rms_norm_backward`, or None."""
    reason = refuse_dtypes(grad_out=grad_out, input=input, rstd=rstd, weight=weight)
    return reason or refuse_columns(math.prod(normalized_shape))


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    require("triton_rms_norm", why_not_rms_norm(input, normalized_shape, weight, eps))
    out, rstd = _rms_norm_fake(input, normalized_shape, weight, eps)
    columns = math.prod(normalized_shape)
    x, result = as_rows(input, columns), out.view(-1, columns)
    weight = None if weight is None else weight.contiguous()
    rows, tile = x.shape[0], row_tile(columns)
    launch(
        rms_norm_forward_kernel,
        (triton.cdiv(rows, tile.rows),),
        x.device,
        *(x, weight, result, rstd, rows, columns, x.stride(0), result.stride(0)),
        torch.finfo(torch.float32).eps if eps is None else eps,
        HAS_WEIGHT=weight is not None,
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return out, rstd


def _rms_norm_fake(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    inner = len(normalized_shape)
    statistics = (*input.shape[: input.dim() - inner], *(1,) * inner)
    return input.new_empty(input.shape), input.new_empty(statistics, dtype=torch.float32)


def _rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    arguments = (grad_out, input, normalized_shape, rstd, weight, output_mask)
    require("triton_rms_norm_backward", why_not_rms_norm_backward(*arguments))
    grad, grad_weight = _rms_norm_backward_fake(*arguments)
    columns = math.prod(normalized_shape)
    x, dy = as_rows(input, columns), as_rows(grad_out, columns)
    dx = None if grad is None else grad.view(-1, columns)
    rows, tile = x.shape[0], row_tile(columns)
    blocks = triton.cdiv(rows, tile.rows)
    programs = min(blocks, SUMMING_PROGRAMS)
    dw = None if grad_weight is None else x.new_empty((programs, columns), dtype=torch.float32)
    launch(
        rms_norm_backward_kernel,
        (programs,),
        x.device,
        *(dy, x, rstd.contiguous(), None if weight is None else weight.contiguous(), dx, dw),
        *(rows, columns, dy.stride(0), x.stride(0), columns),
        HAS_WEIGHT=weight is not None,
        HAS_GRAD=dx is not None,
        HAS_GRAD_WEIGHT=dw is not None,
        STEPS=triton.cdiv(blocks, max(programs, 1)),
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    if dw is None or grad_weight is None:
        return grad, None
    return grad, dw.sum(dim=0).to(grad_weight.dtype).view(grad_weight.shape)


def _rms_norm_backward_fake(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    of_input, of_weight = output_mask
    return (
        input.new_empty(input.shape) if of_input else None,
        weight.new_empty(weight.shape) if of_weight and weight is not None else None,
    )


rms_norm = define(
    "triton_rms_norm",
    "(Tensor input, SymInt[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)",
    _rms_norm,
    _rms_norm_fake,
)
rms_norm_backward = define(
    "triton_rms_norm_backward",
    "(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor rstd, Tensor? weight, "
    "bool[2] output_mask) -> (Tensor, Tensor)",
    _rms_norm_backward,
    _rms_norm_backward_fake,
)

KERNELS = (
    Kernel(
        torch.ops.aten._fused_rms_norm.default,
        rms_norm,
        why_not_rms_norm,
        tuple(
            specimen(
                rms_norm_forward_kernel,
                "*bf16 *bf16 *bf16 *fp32 i32 i32 i32 i32 fp32",
                row_tile(columns),
                HAS_WEIGHT=True,
            )
            for columns in SPECIMEN_COLUMNS
        ),
    ),
    Kernel(
        torch.ops.aten._fused_rms_norm_backward.default,
        rms_norm_backward,
        why_not_rms_norm_backward,
        tuple(
            specimen(
                rms_norm_backward_kernel,
                "*bf16 *bf16 *fp32 *bf16 *bf16 *fp32 i32 i32 i32 i32 i32",
                row_tile(columns),
                HAS_WEIGHT=True,
                HAS_GRAD=True,
                HAS_GRAD_WEIGHT=True,
                STEPS=32,
            )
            for columns in SPECIMEN_COLUMNS
        ),
    ),
)
