"""`aten::native_layer_norm` and its backward, computed by the kernels of `triton_norm.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.kernels.kernel import EXAMPLE_COLUMNS, Kernel, example
from autoshard.kernels.launch import refuse_columns, refuse_dtypes, require, row_tile
from autoshard.kernels.library import define
from autoshard.kernels.triton_norm import (
    norm_backward,
    norm_backward_kernel,
    norm_forward,
    norm_forward_kernel,
    statistics_of,
)


def why_not_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> str | None:
    """Return why the kernel cannot replace `aten::native_layer_norm` on these operands, or None if it can."""
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
    """Return why the kernel cannot replace `aten::native_layer_norm_backward` on these operands, or None if it can."""
    reason = refuse_dtypes(grad_out=grad_out, input=input, mean=mean, rstd=rstd, weight=weight, bias=bias)
    return reason or refuse_columns(math.prod(normalized_shape))


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    require("triton_layer_norm", why_not_layer_norm(input, normalized_shape, weight, bias, eps))
    out, mean, rstd = _layer_norm_fake(input, normalized_shape, weight, bias, eps)
    norm_forward(input, math.prod(normalized_shape), weight, bias, eps, out=out, mean=mean, rstd=rstd)
    return out, mean, rstd


def _layer_norm_fake(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (statistics_of(input, len(normalized_shape)) for _ in range(2))
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
    wanted = {"grad": grad, "grad_weight": grad_weight, "grad_bias": grad_bias}
    norm_backward(grad_out, input, columns, weight, rstd, mean=mean, **wanted)
    return grad, grad_weight, grad_bias


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
            example(
                norm_forward_kernel,
                "*bf16 None None *bf16 *bf16 *bf16 None *fp32 *fp32 i32 i32 i32 i32 fp32",
                row_tile(columns),
                columns,
                CENTRED=True,
                HAS_X_BIAS=False,
                HAS_RESIDUAL=False,
                HAS_WEIGHT=True,
                HAS_BIAS=True,
            )
            for columns in EXAMPLE_COLUMNS
        ),
    ),
    Kernel(
        torch.ops.aten.native_layer_norm_backward.default,
        layer_norm_backward,
        why_not_layer_norm_backward,
        tuple(
            example(
                norm_backward_kernel,
                "*bf16 *bf16 *fp32 *fp32 *bf16 None *bf16 *fp32 *fp32 i32 i32 i32 i32 i32",
                row_tile(columns),
                columns,
                CENTRED=True,
                HAS_WEIGHT=True,
                HAS_RESIDUAL=False,
                HAS_GRAD=True,
                HAS_GRAD_WEIGHT=True,
                HAS_GRAD_BIAS=True,
                STEPS=32,
            )
            for columns in EXAMPLE_COLUMNS
        ),
    ),
)
