"""`aten::_fused_rms_norm` and its backward, computed by the kernels of `triton_norm.py`."""

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


def why_not_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> str | None:
    """Return why the kernel cannot replace `aten::_fused_rms_norm` on these operands, or None if it can."""
    return refuse_dtypes(input=input, weight=weight) or refuse_columns(math.prod(normalized_shape))


def why_not_rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> str | None:
    """Return why the kernel cannot replace `aten::_fused_rms_norm_backward` on these operands, or None if it can."""
    reason = refuse_dtypes(grad_out=grad_out, input=input, rstd=rstd, weight=weight)
    return reason or refuse_columns(math.prod(normalized_shape))


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    require("triton_rms_norm", why_not_rms_norm(input, normalized_shape, weight, eps))
    out, rstd = _rms_norm_fake(input, normalized_shape, weight, eps)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    norm_forward(input, math.prod(normalized_shape), weight, None, eps, out=out, rstd=rstd)
    return out, rstd


def _rms_norm_fake(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    return input.new_empty(input.shape), statistics_of(input, len(normalized_shape))


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
    norm_backward(grad_out, input, math.prod(normalized_shape), weight, rstd, grad=grad, grad_weight=grad_weight)
    return grad, grad_weight


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
            example(
                norm_forward_kernel,
                "*bf16 None None *bf16 None *bf16 None None *fp32 i32 i32 i32 i32 fp32",
                row_tile(columns),
                columns,
                CENTRED=False,
                HAS_X_BIAS=False,
                HAS_RESIDUAL=False,
                HAS_WEIGHT=True,
                HAS_BIAS=False,
            )
            for columns in EXAMPLE_COLUMNS
        ),
    ),
    Kernel(
        torch.ops.aten._fused_rms_norm_backward.default,
        rms_norm_backward,
        why_not_rms_norm_backward,
        tuple(
            example(
                norm_backward_kernel,
                "*bf16 *bf16 None *fp32 *bf16 None *bf16 *fp32 None i32 i32 i32 i32 i32",
                row_tile(columns),
                columns,
                CENTRED=False,
                HAS_WEIGHT=True,
                HAS_RESIDUAL=False,
                HAS_GRAD=True,
                HAS_GRAD_WEIGHT=True,
                HAS_GRAD_BIAS=False,
                STEPS=32,
            )
            for columns in EXAMPLE_COLUMNS
        ),
    ),
)
