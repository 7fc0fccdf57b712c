"""Softmax over the last dim, and its backward, each in one kernel that reads its operands once.

A program holds whole rows on chip, so it reads memory once (Milakov, Gimelshein, "Online normalizer calculation for
softmax", 2018). For a row x and y = softmax(x):

    y_c  = exp(x_c - max x) / sum_c exp(x_c - max x)
    dx_c = y_c (dy_c - sum_c dy_c y_c)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.kernel import EXAMPLE_COLUMNS, Kernel, example
from autoshard.kernels.launch import as_rows, launch, over_rows, refuse_columns, refuse_dtypes, require, row_tile
from autoshard.kernels.library import define


@triton.jit
def softmax_forward_kernel(
    x_ptr,
    out_ptr,
    rows,
    columns,
    x_stride,
    out_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the softmax of BLOCK_R rows. x_ptr and out_ptr are [rows, columns], with stride 1 along columns."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    inside = (row < rows) & (column < columns)
    # A row of padding is 0 instead of -inf, so that it gives no NaN.
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    x = tl.where(row < rows, x, 0.0)
    numerator = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    out = numerator / tl.sum(numerator, axis=1, keep_dims=True)
    tl.store(out_ptr + row * out_stride + column, out, mask=inside)


@triton.jit
def softmax_backward_kernel(
    grad_out_ptr,
    out_ptr,
    grad_ptr,
    rows,
    columns,
    grad_out_stride,
    out_stride,
    grad_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the gradient of the softmax's input for BLOCK_R rows. out_ptr has the softmax.

    grad_out_ptr, out_ptr and grad_ptr are [rows, columns], with stride 1 along columns. BLOCK_C is at least `columns`.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    inside = (row < rows) & (column < columns)
    grad_out = tl.load(grad_out_ptr + row * grad_out_stride + column, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + row * out_stride + column, mask=inside, other=0.0).to(tl.float32)
    projection = tl.sum(grad_out * out, axis=1, keep_dims=True)
    tl.store(grad_ptr + row * grad_stride + column, out * (grad_out - projection), mask=inside)


def softmax_into(x: Tensor, out: Tensor) -> None:
    """Write the softmax of each row of `x` into `out`. Both are [rows, columns], with stride 1 along columns."""
    rows, columns = x.shape
    tile = row_tile(columns)
    launch(
        softmax_forward_kernel,
        over_rows(rows),
        x.device,
        *(x, out, rows, columns, x.stride(0), out.stride(0)),
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )


def softmax_backward_into(grad_out: Tensor, out: Tensor, grad: Tensor) -> None:
    """Write the gradient of the softmax's input into `grad`. `out` is the softmax, and `grad_out` is its gradient.

    All three tensors are [rows, columns], with stride 1 along columns.
    """
    rows, columns = out.shape
    tile = row_tile(columns)
    launch(
        softmax_backward_kernel,
        over_rows(rows),
        out.device,
        *(grad_out, out, grad, rows, columns, grad_out.stride(0), out.stride(0), grad.stride(0)),
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )


def why_not_softmax(x: Tensor, dim: int, half_to_float: bool) -> str | None:
    """Return why the kernel cannot replace `aten::_softmax` on these operands, or None if it can."""
    return _refuse_dim(x, dim) or refuse_dtypes(x=x) or refuse_columns(x.shape[-1])


def why_not_softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot replace `aten::_softmax_backward_data` on these operands, or None if it can."""
    reason = refuse_dtypes(grad_output=grad_output, output=output)
    return _refuse_dim(output, dim) or reason or refuse_columns(output.shape[-1])


def _refuse_dim(x: Tensor, dim: int) -> str | None:
    if x.dim() > 0 and dim in (-1, x.dim() - 1):
        return None
    return f"dim={dim} of {x.dim()} is not the last."


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    require("triton_softmax", why_not_softmax(x, dim, half_to_float))
    out = _softmax_fake(x, dim, half_to_float)
    columns = x.shape[-1]
    softmax_into(as_rows(x, columns), out.view(-1, columns))
    return out


def _softmax_fake(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32 if half_to_float else x.dtype)


def _softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    reason = why_not_softmax_backward(grad_output, output, dim, input_dtype)
    require("triton_softmax_backward", reason)
    grad = _softmax_backward_fake(grad_output, output, dim, input_dtype)
    columns = output.shape[-1]
    softmax_backward_into(as_rows(grad_output, columns), as_rows(output, columns), grad.view(-1, columns))
    return grad


def _softmax_backward_fake(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return output.new_empty(output.shape, dtype=input_dtype)


softmax = define("triton_softmax", "(Tensor self, int dim, bool half_to_float) -> Tensor", _softmax, _softmax_fake)
softmax_backward = define(
    "triton_softmax_backward",
    "(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor",
    _softmax_backward,
    _softmax_backward_fake,
)

KERNELS = (
    Kernel(
        torch.ops.aten._softmax.default,
        softmax,
        why_not_softmax,
        tuple(
            example(softmax_forward_kernel, "*bf16 *bf16 i32 i32 i32 i32", row_tile(columns), columns)
            for columns in EXAMPLE_COLUMNS
        ),
    ),
    Kernel(
        torch.ops.aten._softmax_backward_data.default,
        softmax_backward,
        why_not_softmax_backward,
        tuple(
            example(softmax_backward_kernel, "*bf16 *bf16 *bf16 i32 i32 i32 i32 i32", row_tile(columns), columns)
            for columns in EXAMPLE_COLUMNS
        ),
    ),
)
