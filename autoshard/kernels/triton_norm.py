"""One forward and one backward kernel for both layer norm and RMS norm. Each kernel reads its input once.

Ba, Kiros, Hinton, "Layer normalization" (2016); Zhang, Sennrich, "Root mean square layer normalization" (NeurIPS 2019).
Let x be a row of C columns, after a bias and a residual are added, if given. Let n = (x - mean) rstd and g = dout w.
RMS norm has mean = 0, and its dx lacks the term mean_c g:

    mean = mean_c x_c,  rstd = 1 / sqrt(mean_c (x_c - mean)^2 + eps),  out = n w + b
    dx   = rstd (g - mean_c g - n mean_c(g n)),  dw = sum over rows of dout n,  db = sum over rows of dout

Each program of the backward walks many rows, and sums dw and db over them. The sums of all programs are added after the
kernel, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.launch import as_rows, cdiv, launch, over_rows, row_tile

# Backward programs, each of which sums the weight gradients of many rows. A fixed number, so all devices sum alike.
SUMMING_PROGRAMS = 256


@triton.jit
def norm_forward_kernel(
    x_ptr,
    x_bias_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    total_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    columns,
    x_stride,
    residual_stride,
    eps,
    CENTRED: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Normalise a block of rows of x + x_bias + residual, and store the sum in total_ptr if there is a residual.

    The matrices x_ptr, residual_ptr, out_ptr and total_ptr are [rows, columns], the last two contiguous. The vectors
    x_bias_ptr, weight_ptr and bias_ptr are [columns]. The statistics mean_ptr and rstd_ptr [rows] are float32. CENTRED
    selects layer norm. BLOCK_C is at least `columns`.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_X_BIAS:
        x += tl.load(x_bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row[:, None] * residual_stride + column[None, :], mask=inside, other=0.0)
        # Rounded as it is stored, so that the backward normalises the same values as the forward.
        total = (x + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + place, total, mask=inside)
        x = total.to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, axis=1) / columns
        x = tl.where(inside, x - mean[:, None], 0.0)
        tl.store(mean_ptr + row, mean, mask=row < rows)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / columns + eps)
    out = x * rstd[:, None]
    if HAS_WEIGHT:
        out *= tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + place, out, mask=inside)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def norm_backward_kernel(
    grad_out_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    residual_grad_ptr,
    grad_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    rows,
    columns,
    grad_out_stride,
    x_stride,
    residual_grad_stride,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    HAS_GRAD_WEIGHT: tl.constexpr,
    HAS_GRAD_BIAS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the gradient of x plus residual_grad, and each program's sums for the gradients of weight and bias.

    The matrices grad_out_ptr, x_ptr, residual_grad_ptr and grad_ptr are [rows, columns], the last contiguous. The
    statistics mean_ptr and rstd_ptr are [rows], and weight_ptr is [columns]. The sums grad_weight_ptr and grad_bias_ptr
    [programs, columns] are float32. Program i computes the row blocks i, i + programs, i + 2 programs and so on, STEPS
    blocks in all.
    """
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
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        normed = x.to(tl.float32) * rstd
        if CENTRED:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
            normed = tl.where(inside, normed - mean * rstd, 0.0)
        if HAS_GRAD:
            weighted = grad_out * weight[None, :]
            grad = weighted - normed * (tl.sum(weighted * normed, axis=1, keep_dims=True) / columns)
            if CENTRED:
                grad -= tl.sum(weighted, axis=1, keep_dims=True) / columns
            grad *= rstd
            if HAS_RESIDUAL:
                other = residual_grad_ptr + row[:, None] * residual_grad_stride + column[None, :]
                grad += tl.load(other, mask=inside, other=0.0).to(tl.float32)
            tl.store(grad_ptr + row[:, None] * columns + column[None, :], grad, mask=inside)
        grad_weight += tl.sum(grad_out * normed, axis=0)
        grad_bias += tl.sum(grad_out, axis=0)
    partial = program.to(tl.int64) * columns + column
    if HAS_GRAD_WEIGHT:
        tl.store(grad_weight_ptr + partial, grad_weight, mask=column < columns)
    if HAS_GRAD_BIAS:
        tl.store(grad_bias_ptr + partial, grad_bias, mask=column < columns)


def norm_forward(
    x: Tensor,
    columns: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    out: Tensor,
    rstd: Tensor,
    mean: Tensor | None = None,
    x_bias: Tensor | None = None,
    residual: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """Normalise the rows of x + x_bias + residual, by layer norm if `mean` is given, else by RMS norm.

    Args:
        x, residual: tensors of rows, of any shape. `residual` may be None.
        columns: elements of a row.
        weight, bias, x_bias: tensors with a row's elements, or None.
        out: contiguous, overwritten with the result.
        rstd, mean: float32 with one element for each row, overwritten.
        total: contiguous, overwritten with x + x_bias + residual. Needed with a residual.
    """
    rows = as_rows(x, columns)
    added = None if residual is None else as_rows(residual, columns)
    count = rows.shape[0]
    launch(
        norm_forward_kernel,
        over_rows(count),
        x.device,
        *(rows, _contiguous(x_bias), added, _contiguous(weight), _contiguous(bias), out, total, mean, rstd),
        *(count, columns, rows.stride(0), 0 if added is None else added.stride(0), eps),
        CENTRED=mean is not None,
        HAS_X_BIAS=x_bias is not None,
        HAS_RESIDUAL=added is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        **row_tile(columns).options,
    )


def norm_backward(
    grad_out: Tensor,
    x: Tensor,
    columns: int,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    mean: Tensor | None = None,
    residual_grad: Tensor | None = None,
    grad: Tensor | None = None,
    grad_weight: Tensor | None = None,
    grad_bias: Tensor | None = None,
) -> None:
    """Write the gradients of `norm_forward` with respect to its normalised rows, weight and bias into given tensors.

    Args:
        grad_out, x, residual_grad: tensors of one shape. `x` has the rows that were normalised. `residual_grad` is
            added to their gradient, or None.
        columns: elements of a row.
        weight, rstd, mean: arguments of `norm_forward`.
        grad, grad_weight, grad_bias: contiguous, overwritten. None if the gradient is not needed.
    """
    rows, grads = as_rows(x, columns), as_rows(grad_out, columns)
    others = None if residual_grad is None else as_rows(residual_grad, columns)
    count, tile = rows.shape[0], row_tile(columns)
    programs = min(triton.cdiv(count, tile.rows), SUMMING_PROGRAMS)
    partials = [
        None if wanted is None else x.new_empty((programs, columns), dtype=torch.float32)
        for wanted in (grad_weight, grad_bias)
    ]
    launch(
        norm_backward_kernel,
        lambda blocks: (programs,),
        x.device,
        *(grads, rows, _contiguous(mean), rstd.contiguous(), _contiguous(weight), others, grad, *partials),
        *(count, columns, grads.stride(0), rows.stride(0), 0 if others is None else others.stride(0)),
        CENTRED=mean is not None,
        HAS_WEIGHT=weight is not None,
        HAS_RESIDUAL=others is not None,
        HAS_GRAD=grad is not None,
        HAS_GRAD_WEIGHT=grad_weight is not None,
        HAS_GRAD_BIAS=grad_bias is not None,
        follow=lambda blocks: {"STEPS": cdiv(count, blocks["BLOCK_R"] * programs)},
        **tile.options,
    )
    for partial, result in zip(partials, (grad_weight, grad_bias), strict=True):
        if partial is not None and result is not None:
            result.copy_(partial.sum(dim=0).view(result.shape))


def statistics_of(x: Tensor, dims: int) -> Tensor:
    """Return an empty float32 tensor with one element for each row of `x`. A row spans the last `dims` dims."""
    return x.new_empty((*x.shape[: x.dim() - dims], *(1,) * dims), dtype=torch.float32)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
