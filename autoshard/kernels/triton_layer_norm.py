"""Layer norm, forward and backward, each reading its input once.

Ba, Kiros, Hinton, "Layer normalization" (2016). For a row x of C columns, n = (x - mean) rstd, g = dout w:

    mean = mean_c x_c,  rstd = 1 / sqrt(mean_c (x_c - mean)^2 + eps),  out = n w + b
    dx   = rstd (g - mean_c g - n mean_c(g n)),  dw = sum over rows of dout n,  db = sum over rows of dout

The backward's programs each walk many rows and keep one partial dw and db; these are summed at the end, in a
fixed order.
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
def layer_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    columns,
    x_stride,
    out_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """x_ptr, out_ptr [rows, columns]; weight_ptr, bias_ptr [columns]; mean_ptr, rstd_ptr [rows] float32."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / columns
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / columns + eps)
    out = centred * rstd[:, None]
    if HAS_WEIGHT:
        out *= tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + row[:, None] * out_stride + column[None, :], out, mask=inside)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def layer_norm_backward_kernel(
    grad_out_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    grad_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    rows,
    columns,
    grad_out_stride,
    x_stride,
    grad_stride,
    HAS_WEIGHT: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    HAS_GRAD_WEIGHT: tl.constexpr,
    HAS_GRAD_BIAS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """grad_out_ptr, x_ptr, grad_ptr [rows, columns]; mean_ptr, rstd_ptr [rows]; weight_ptr [columns];
    grad_weight_ptr, grad_bias_ptr [programs, columns] float32: program i sums blocks i, i + programs, ..."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_C)
    weight = tl.full((BLOCK_C,), 1.0, dtype=tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK_C,), dtype=tl.float32)
    grad_bias = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for step in range(STEPS):
        block = program.to(tl.int64) + step * tl.num_programs(0)
        row = block * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        grad_out = tl.load(grad_out_ptr + row[:, None] * grad_out_stride + column[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        normed = tl.where(inside, (x.to(tl.float32) - mean) * rstd, 0.0)
        if HAS_GRAD:
            weighted = grad_out * weight[None, :]
            average = tl.sum(weighted, axis=1, keep_dims=True) / columns
            projection = tl.sum(weighted * normed, axis=1, keep_dims=True) / columns
            grad = rstd * (weighted - average - normed * projection)
            tl.store(grad_ptr + row[:, None] * grad_stride + column[None, :], grad, mask=inside)
        grad_weight += tl.sum(grad_out * normed, axis=0)
        grad_bias += tl.sum(grad_out, axis=0)
    partial = program.to(tl.int64) * columns + column
    if HAS_GRAD_WEIGHT:
        tl.store(grad_weight_ptr + partial, grad_weight, mask=column < columns)
    if HAS_GRAD_BIAS:
        tl.store(grad_bias_ptr + partial, grad_bias, mask=column < columns)


def why_not_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> str | None:
    """Why the kernel cannot stand in for `aten::native_layer_norm`, or None."""
    reason = refuse_dtypes(input=input, weight=weight, bias=bias)
    return reason or refuse_columns(math.prod(normalized_shape))


def why_not_layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> str | None:
    """Why the kernel cannot stand in for `aten::native_layer_norm_backward`, or None."""
    reason = refuse_dtypes(grad_out=grad_out, input=input, mean=mean, rstd=rstd, weight=weight, bias=bias)
    return reason or refuse_columns(math.prod(normalized_shape))


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    require("triton_layer_norm", why_not_layer_norm(input, normalized_shape, weight, bias, eps))
    out, mean, rstd = _layer_norm_fake(input, normalized_shape, weight, bias, eps)
    columns = math.prod(normalized_shape)
    x, result = as_rows(input, columns), out.view(-1, columns)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    rows, tile = x.shape[0], row_tile(columns)
    launch(
        layer_norm_forward_kernel,
        (triton.cdiv(rows, tile.rows),),
        x.device,
        *(x, weight, bias, result, mean, rstd),
        *(rows, columns, x.stride(0), result.stride(0), eps),
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return out, mean, rstd


def _layer_norm_fake(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    inner = len(normalized_shape)
    statistics = (*input.shape[: input.dim() - inner], *(1,) * inner)
    mean, rstd = (input.new_empty(statistics, dtype=torch.float32) for _ in range(2))
    return input.new_empty(input.shape), mean, rstd


def _layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    arguments = (grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask)
    require("triton_layer_norm_backward", why_not_layer_norm_backward(*arguments))
    grad, grad_weight, grad_bias = _layer_norm_backward_fake(*arguments)
    columns = math.prod(normalized_shape)
    x, dy = as_rows(input, columns), as_rows(grad_out, columns)
    dx = None if grad is None else grad.view(-1, columns)
    rows, tile = x.shape[0], row_tile(columns)
    blocks = triton.cdiv(rows, tile.rows)
    programs = min(blocks, SUMMING_PROGRAMS)
    dw, db = (
        None if wanted is None else x.new_empty((programs, columns), dtype=torch.float32)
        for wanted in (grad_weight, grad_bias)
    )
    launch(
        layer_norm_backward_kernel,
        (programs,),
        x.device,
        *(dy, x, mean.contiguous(), rstd.contiguous(), None if weight is None else weight.contiguous()),
        *(dx, dw, db, rows, columns, dy.stride(0), x.stride(0), columns),
        HAS_WEIGHT=weight is not None,
        HAS_GRAD=dx is not None,
        HAS_GRAD_WEIGHT=dw is not None,
        HAS_GRAD_BIAS=db is not None,
        STEPS=triton.cdiv(blocks, max(programs, 1)),
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return grad, _sum_partials(dw, grad_weight), _sum_partials(db, grad_bias)


def _sum_partials(partials: Tensor | None, result: Tensor | None) -> Tensor | None:
    """The programs' partial sums, summed, in `result`'s shape and dtype."""
    if partials is None or result is None:
        return None
    return partials.sum(dim=0).to(result.dtype).view(result.shape)


def _layer_norm_backward_fake(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    of_input, of_weight, of_bias = output_mask
    return (
        input.new_empty(input.shape) if of_input else None,
        weight.new_empty(weight.shape) if of_weight and weight is not None else None,
        bias.new_empty(bias.shape) if of_bias and bias is not None else None,
    )


layer_norm = define(
    "triton_layer_norm",
    "(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm,
    _layer_norm_fake,
)
layer_norm_backward = define(
    "triton_layer_norm_backward",
    "(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight, "
    "Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    _layer_norm_backward,
    _layer_norm_backward_fake,
)

KERNELS = (
    Kernel(
        torch.ops.aten.native_layer_norm.default,
        layer_norm,
        why_not_layer_norm,
        tuple(
            specimen(
                layer_norm_forward_kernel,
                "*bf16 *bf16 *bf16 *bf16 *fp32 *fp32 i32 i32 i32 i32 fp32",
                row_tile(columns),
                HAS_WEIGHT=True,
                HAS_BIAS=True,
            )
            for columns in SPECIMEN_COLUMNS
        ),
    ),
    Kernel(
        torch.ops.aten.native_layer_norm_backward.default,
        layer_norm_backward,
        why_not_layer_norm_backward,
        tuple(
            specimen(
                layer_norm_backward_kernel,
                "*bf16 *bf16 *fp32 *fp32 *bf16 *bf16 *fp32 *fp32 i32 i32 i32 i32 i32",
                row_tile(columns),
                HAS_WEIGHT=True,
                HAS_GRAD=True,
                HAS_GRAD_WEIGHT=True,
                HAS_GRAD_BIAS=True,
                STEPS=32,
            )
            for columns in SPECIMEN_COLUMNS
        ),
    ),
)
