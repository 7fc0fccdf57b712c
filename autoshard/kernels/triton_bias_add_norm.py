"""RMS norm and layer norm fused with the addition of a bias and a residual before them.

    total = x + x_bias + residual,  out = norm(total)

x is the matrix product of a linear layer with the bias x_bias, after its reduce-scatter or all-reduce under tensor
parallelism. The kernel is that of `triton_norm.py`. The backward is that of `triton_add_norm.py`, because the gradient
of x_bias is the sum of the residual's gradient over rows.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from autoshard.kernels.kernel import Form, FusedKernel
from autoshard.kernels.launch import refuse_columns, refuse_dtypes, require
from autoshard.kernels.library import define
from autoshard.kernels.triton_add_norm import forward_examples, written_out
from autoshard.kernels.triton_norm import norm_forward, statistics_of

_aten = torch.ops.aten


def why_not_bias_add_rms_norm(
    x: Tensor, x_bias: Tensor, residual: Tensor, weight: Tensor | None, eps: float | None
) -> str | None:
    """Return why `triton_bias_add_rms_norm` cannot take these operands, or None if it can."""
    return _refuse(x, x_bias, residual, weight=weight)


def why_not_bias_add_layer_norm(
    x: Tensor, x_bias: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> str | None:
    """Return why `triton_bias_add_layer_norm` cannot take these operands, or None if it can."""
    return _refuse(x, x_bias, residual, weight=weight, bias=bias)


def _refuse(x: Tensor, x_bias: Tensor, residual: Tensor, **tensors: Tensor | None) -> str | None:
    reason = refuse_dtypes(x=x, x_bias=x_bias, residual=residual, **tensors)
    if reason is not None:
        return reason
    if x.dim() == 0 or residual.dim() == 0 or x.shape[-1] != residual.shape[-1] or x.numel() != residual.numel():
        return f"x {tuple(x.shape)} and residual {tuple(residual.shape)} have different rows."
    if x_bias.shape != x.shape[-1:]:
        return f"x_bias {tuple(x_bias.shape)} is not a row of x {tuple(x.shape)}."
    if len({x.dtype, x_bias.dtype, residual.dtype}) > 1:
        return f"the added tensors have different dtypes: {x.dtype}, {x_bias.dtype}, {residual.dtype}."
    return refuse_columns(x.shape[-1])


def _bias_add_rms_norm(
    x: Tensor, x_bias: Tensor, residual: Tensor, weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    require("triton_bias_add_rms_norm", why_not_bias_add_rms_norm(x, x_bias, residual, weight, eps))
    out, rstd, total = _bias_add_rms_norm_fake(x, x_bias, residual, weight, eps)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    wanted = {"out": out, "rstd": rstd, "x_bias": x_bias, "residual": residual, "total": total}
    norm_forward(x, x.shape[-1], weight, None, eps, **wanted)
    return out, rstd, total


def _bias_add_rms_norm_fake(
    x: Tensor, x_bias: Tensor, residual: Tensor, weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    return residual.new_empty(residual.shape), statistics_of(residual, 1), residual.new_empty(residual.shape)


def _bias_add_layer_norm(
    x: Tensor, x_bias: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require("triton_bias_add_layer_norm", why_not_bias_add_layer_norm(x, x_bias, residual, weight, bias, eps))
    out, mean, rstd, total = _bias_add_layer_norm_fake(x, x_bias, residual, weight, bias, eps)
    wanted = {"out": out, "mean": mean, "rstd": rstd, "x_bias": x_bias, "residual": residual, "total": total}
    norm_forward(x, x.shape[-1], weight, bias, eps, **wanted)
    return out, mean, rstd, total


def _bias_add_layer_norm_fake(
    x: Tensor, x_bias: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    empty, statistics = residual.new_empty(residual.shape), statistics_of(residual, 1)
    return empty, statistics, statistics_of(residual, 1), residual.new_empty(residual.shape)


bias_add_rms_norm = define(
    "triton_bias_add_rms_norm",
    "(Tensor x, Tensor x_bias, Tensor residual, Tensor? weight, float? eps) -> (Tensor out, Tensor rstd, Tensor total)",
    _bias_add_rms_norm,
    _bias_add_rms_norm_fake,
)
bias_add_layer_norm = define(
    "triton_bias_add_layer_norm",
    "(Tensor x, Tensor x_bias, Tensor residual, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor out, Tensor mean, Tensor rstd, Tensor total)",
    _bias_add_layer_norm,
    _bias_add_layer_norm_fake,
)


def _total(like: Tensor, x: Any, x_bias: Any, residual: Any) -> Any:
    """Add the bias to x [rows, columns], reshape the sum to the shape of `like`, and add the residual."""
    biased = _aten.reshape.default(_aten.add.Tensor(x, x_bias), list(like.shape))
    return _aten.add.Tensor(biased, residual)


def _total_alike(like: Tensor, x: Any, x_bias: Any, residual: Any) -> Any:
    return _aten.add.Tensor(_aten.add.Tensor(x, x_bias), residual)


def _layer_norm_of(total: Any) -> Any:
    def compose(like: Tensor, x: Any, x_bias: Any, residual: Any, weight: Any, bias: Any, eps: Any) -> tuple[Any, ...]:
        summed = total(like, x, x_bias, residual)
        results = _aten.native_layer_norm.default(summed, [like.shape[-1]], weight, bias, eps)
        return *(operator.getitem(results, index) for index in range(3)), summed

    return compose


def _rms_norm_of(total: Any) -> Any:
    def compose(like: Tensor, x: Any, x_bias: Any, residual: Any, weight: Any, eps: Any) -> tuple[Any, ...]:
        summed = total(like, x, x_bias, residual)
        results = _aten._fused_rms_norm.default(summed, [like.shape[-1]], weight, eps)
        return operator.getitem(results, 0), operator.getitem(results, 1), summed

    return compose


def _written_out_of(total: Any) -> Any:
    def compose(like: Tensor, x: Any, x_bias: Any, residual: Any, weight: Any, eps: Any) -> tuple[Any, ...]:
        summed = total(like, x, x_bias, residual)
        return *written_out(like, summed, weight, eps), summed

    return compose


_SUMS = (_total, _total_alike)

FUSED = (
    FusedKernel(
        bias_add_layer_norm,
        why_not_bias_add_layer_norm,
        tuple(Form(_layer_norm_of(total)) for total in _SUMS),
        forward_examples(centred=True, has_x_bias=True),
    ),
    FusedKernel(
        bias_add_rms_norm,
        why_not_bias_add_rms_norm,
        tuple(Form(make(total)) for make in (_written_out_of, _rms_norm_of) for total in _SUMS),
        forward_examples(centred=False, has_x_bias=True),
    ),
)
