"""RMS norm and layer norm fused with the residual additions around them.

    forward:   total = x + residual,  out = norm(total)
    backward:  dx = dresidual = residual_grad + gradient of total through the norm

In a pre-norm block, `total` is the residual of the next block, and residual_grad is its gradient from there. The
kernels are those of `triton_norm.py`. They replace an addition and a norm, which is torch's or the RMS norm of
transformers. The latter has pow, mean, rsqrt and mul in float32, with casts of narrower dtypes before and after.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.kernels.kernel import EXAMPLE_COLUMNS, Form, FusedKernel, example
from autoshard.kernels.launch import refuse_columns, refuse_dtypes, require, row_tile
from autoshard.kernels.library import define
from autoshard.kernels.triton_norm import (
    norm_backward,
    norm_backward_kernel,
    norm_forward,
    norm_forward_kernel,
    statistics_of,
)
from autoshard.kernels.triton_rms_norm import rms_norm, why_not_rms_norm

_aten = torch.ops.aten


def why_not_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float | None) -> str | None:
    """Return why `triton_add_rms_norm` cannot take these operands, or None if it can."""
    return _refuse(x, residual, weight=weight)


def why_not_add_rms_norm_backward(
    grad_out: Tensor,
    residual_grad: Tensor | None,
    input: Tensor,
    rstd: Tensor,
    weight: Tensor,
    weight_shape: Sequence[int],
) -> str | None:
    """Return why `triton_add_rms_norm_backward` cannot take these operands, or None if it can."""
    return _refuse(input, grad_out if residual_grad is None else residual_grad, grad_out=grad_out, weight=weight)


def why_not_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> str | None:
    """Return why `triton_add_layer_norm` cannot take these operands, or None if it can."""
    return _refuse(x, residual, weight=weight, bias=bias)


def why_not_add_layer_norm_backward(
    grad_out: Tensor,
    residual_grad: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> str | None:
    """Return why `triton_add_layer_norm_backward` cannot take these operands, or None if it can."""
    return _refuse(input, residual_grad, grad_out=grad_out, weight=weight, bias=bias)


def _refuse(x: Tensor, other: Tensor, **tensors: Tensor | None) -> str | None:
    """Return why a kernel cannot add `x` and `other` and normalise the rows of the sum, or None if it can.

    `tensors` has further operands by name, whose dtypes must be supported.
    """
    reason = refuse_dtypes(x=x, other=other, **tensors)
    if reason is None and (x.shape != other.shape or x.dtype != other.dtype or x.dim() == 0):
        return f"the added tensors have shapes {tuple(x.shape)}, {tuple(other.shape)}, dtypes {x.dtype}, {other.dtype}."
    return reason or refuse_columns(x.shape[-1])


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    require("triton_add_rms_norm", why_not_add_rms_norm(x, residual, weight, eps))
    out, rstd, total = _add_rms_norm_fake(x, residual, weight, eps)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    norm_forward(x, x.shape[-1], weight, None, eps, out=out, rstd=rstd, residual=residual, total=total)
    return out, rstd, total


def _add_rms_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), statistics_of(x, 1), x.new_empty(x.shape)


def _add_rms_norm_backward(
    grad_out: Tensor,
    residual_grad: Tensor | None,
    input: Tensor,
    rstd: Tensor,
    weight: Tensor,
    weight_shape: Sequence[int],
) -> tuple[Tensor, Tensor]:
    arguments = (grad_out, residual_grad, input, rstd, weight, weight_shape)
    require("triton_add_rms_norm_backward", why_not_add_rms_norm_backward(*arguments))
    grad, grad_weight = _add_rms_norm_backward_fake(*arguments)
    wanted = {"residual_grad": residual_grad, "grad": grad, "grad_weight": grad_weight}
    norm_backward(grad_out, input, input.shape[-1], weight, rstd, **wanted)
    return grad, grad_weight


def _add_rms_norm_backward_fake(
    grad_out: Tensor,
    residual_grad: Tensor | None,
    input: Tensor,
    rstd: Tensor,
    weight: Tensor,
    weight_shape: Sequence[int],
) -> tuple[Tensor, Tensor]:
    return input.new_empty(input.shape), weight.new_empty(weight_shape)


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    require("triton_add_layer_norm", why_not_add_layer_norm(x, residual, weight, bias, eps))
    out, mean, rstd, total = _add_layer_norm_fake(x, residual, weight, bias, eps)
    wanted = {"out": out, "mean": mean, "rstd": rstd, "residual": residual, "total": total}
    norm_forward(x, x.shape[-1], weight, bias, eps, **wanted)
    return out, mean, rstd, total


def _add_layer_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), statistics_of(x, 1), statistics_of(x, 1), x.new_empty(x.shape)


def _add_layer_norm_backward(
    grad_out: Tensor,
    residual_grad: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    arguments = (grad_out, residual_grad, input, mean, rstd, weight, bias)
    require("triton_add_layer_norm_backward", why_not_add_layer_norm_backward(*arguments))
    grad, grad_weight, grad_bias = _add_layer_norm_backward_fake(*arguments)
    wanted = {"residual_grad": residual_grad, "grad": grad, "grad_weight": grad_weight, "grad_bias": grad_bias}
    norm_backward(grad_out, input, input.shape[-1], weight, rstd, mean=mean, **wanted)
    return grad, grad_weight, grad_bias


def _add_layer_norm_backward_fake(
    grad_out: Tensor,
    residual_grad: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return input.new_empty(input.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)


add_rms_norm = define(
    "triton_add_rms_norm",
    "(Tensor x, Tensor residual, Tensor? weight, float? eps) -> (Tensor out, Tensor rstd, Tensor total)",
    _add_rms_norm,
    _add_rms_norm_fake,
)
add_rms_norm_backward = define(
    "triton_add_rms_norm_backward",
    "(Tensor grad_out, Tensor? residual_grad, Tensor input, Tensor rstd, Tensor weight, SymInt[] weight_shape)"
    " -> (Tensor grad, Tensor grad_weight)",
    _add_rms_norm_backward,
    _add_rms_norm_backward_fake,
)
add_layer_norm = define(
    "triton_add_layer_norm",
    "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor out, Tensor mean, Tensor rstd, Tensor total)",
    _add_layer_norm,
    _add_layer_norm_fake,
)
add_layer_norm_backward = define(
    "triton_add_layer_norm_backward",
    "(Tensor grad_out, Tensor residual_grad, Tensor input, Tensor mean, Tensor rstd, Tensor weight, Tensor bias)"
    " -> (Tensor grad, Tensor grad_weight, Tensor grad_bias)",
    _add_layer_norm_backward,
    _add_layer_norm_backward_fake,
)


def _wide(like: Tensor, x: Any) -> Any:
    """Cast to float32, as transformers' norm casts its input. `like` has the model's dtype."""
    return x if like.dtype == torch.float32 else _aten._to_copy.default(x, dtype=torch.float32)


def _narrow(like: Tensor, x: Any) -> Any:
    """Cast to the dtype of `like`, as transformers' norm casts its result back."""
    return x if like.dtype == torch.float32 else _aten._to_copy.default(x, dtype=like.dtype)


def _cast_gradient(like: Tensor, x: Any, dtype: torch.dtype) -> Any:
    """Return `x` cast to `dtype`, by the call that autograd makes for the gradient of a cast.

    `like` has the model's dtype. A model in float32 has no casts, so `x` itself is returned.
    """
    if like.dtype == torch.float32:
        return x
    return _aten._to_copy.default(x, dtype=dtype, layout=torch.strided, device=like.device)


def written_out(like: Tensor, input: Any, weight: Any, eps: Any) -> tuple[Any, Any]:
    """Return the RMS norm of transformers, weight (x rsqrt(mean(x^2) + eps)), and the rsqrt."""
    x = _wide(like, input)
    mean = _aten.mean.dim(_aten.pow.Tensor_Scalar(x, 2), [-1], True)
    rstd = _aten.rsqrt.default(_aten.add.Tensor(mean, eps))
    return _aten.mul.Tensor(weight, _narrow(like, _aten.mul.Tensor(x, rstd))), rstd


def _add_written_out(like: Tensor, x: Any, residual: Any, weight: Any, eps: Any) -> tuple[Any, ...]:
    total = _aten.add.Tensor(x, residual)
    return *written_out(like, total, weight, eps), total


def _written_out_backward(like: Tensor, grad_out: Any, input: Any, rstd: Any, weight: Any) -> tuple[Any, Any]:
    """Return the gradients that autograd derives from `written_out`: the two addends of dx, and dw.

    The calls sum dw over rows with `keepdim=True`.
    """
    last, x = like.dim() - 1, _wide(like, input)
    weighted = _cast_gradient(like, _aten.mul.Tensor(grad_out, weight), torch.float32)
    normed = _narrow(like, _aten.mul.Tensor(x, rstd))
    grad_weight = _aten.sum.dim_IntList(_aten.mul.Tensor(grad_out, normed), list(range(last)), True)
    summed = _aten.sum.dim_IntList(_aten.mul.Tensor(weighted, x), [last], True)
    of_mean = _aten.mul.Tensor(_aten.mul.Scalar(summed, -0.5), _aten.pow.Tensor_Scalar(rstd, 3))
    of_square = _aten.div.Scalar(_aten.expand.default(of_mean, list(like.shape)), like.shape[-1])
    through = _aten.mul.Tensor(of_square, _aten.mul.Scalar(_aten.pow.Tensor_Scalar(x, 1.0), 2.0))
    return (_aten.mul.Tensor(weighted, rstd), through), grad_weight


def _alone_backward(like: Tensor, grad_out: Any, input: Any, rstd: Any, weight: Any) -> tuple[Any, Any]:
    (direct, through), grad_weight = _written_out_backward(like, grad_out, input, rstd, weight)
    return _cast_gradient(like, _aten.add.Tensor(direct, through), like.dtype), grad_weight


def _added_backward(
    like: Tensor, grad_out: Any, residual_grad: Any, input: Any, rstd: Any, weight: Any
) -> tuple[Any, Any]:
    """Return the gradient of x plus `residual_grad`, and the gradient of the weight, in autograd's order of operations.

    In float32, the two addends of dx are added to `residual_grad` one after the other. In narrower dtypes, dx is
    rounded first.
    """
    (direct, through), grad_weight = _written_out_backward(like, grad_out, input, rstd, weight)
    if like.dtype == torch.float32:
        return _aten.add.Tensor(_aten.add.Tensor(residual_grad, direct), through), grad_weight
    grad = _cast_gradient(like, _aten.add.Tensor(direct, through), like.dtype)
    return _aten.add.Tensor(residual_grad, grad), grad_weight


def _add_whole(like: Tensor, x: Any, residual: Any, weight: Any, eps: Any) -> tuple[Any, ...]:
    total = _aten.add.Tensor(x, residual)
    results = _aten._fused_rms_norm.default(total, [like.shape[-1]], weight, eps)
    return operator.getitem(results, 0), operator.getitem(results, 1), total


def _whole_added_backward(
    like: Tensor, grad_out: Any, residual_grad: Any, input: Any, rstd: Any, weight: Any
) -> tuple[Any, Any]:
    arguments = (grad_out, input, [like.shape[-1]], rstd, weight, [True, True])
    results = _aten._fused_rms_norm_backward.default(*arguments)
    return _aten.add.Tensor(residual_grad, operator.getitem(results, 0)), operator.getitem(results, 1)


def _add_layer(like: Tensor, x: Any, residual: Any, weight: Any, bias: Any, eps: Any) -> tuple[Any, ...]:
    total = _aten.add.Tensor(x, residual)
    results = _aten.native_layer_norm.default(total, [like.shape[-1]], weight, bias, eps)
    return *(operator.getitem(results, index) for index in range(3)), total


def _layer_added_backward(
    like: Tensor, grad_out: Any, residual_grad: Any, input: Any, mean: Any, rstd: Any, weight: Any, bias: Any
) -> tuple[Any, ...]:
    arguments = (grad_out, input, [like.shape[-1]], mean, rstd, weight, bias, [True, True, True])
    results = _aten.native_layer_norm_backward.default(*arguments)
    grad, grad_weight, grad_bias = (operator.getitem(results, index) for index in range(3))
    return _aten.add.Tensor(residual_grad, grad), grad_weight, grad_bias


def _kept_dims(like: Tensor) -> list[int]:
    return [*[1] * (like.dim() - 1), like.shape[-1]]


_NORM = "*bf16 {x_bias} *bf16 *bf16 {bias} *bf16 *bf16 {mean} *fp32 i32 i32 i32 i32 fp32"
_BACKWARD = "*bf16 *bf16 {mean} *fp32 *bf16 *bf16 *bf16 *fp32 {bias} i32 i32 i32 i32 i32"


def forward_examples(centred: bool, has_x_bias: bool = False) -> tuple[Any, ...]:
    """Return compilations of the forward kernel with a residual, for layer norm (`centred`) or RMS norm."""
    kinds = {True: "*bf16", False: "None"}
    types = _NORM.format(x_bias=kinds[has_x_bias], bias=kinds[centred], mean="*fp32" if centred else "None")
    flags = {"CENTRED": centred, "HAS_X_BIAS": has_x_bias, "HAS_RESIDUAL": True, "HAS_WEIGHT": True}
    flags |= {"HAS_BIAS": centred}
    return tuple(
        example(norm_forward_kernel, types, row_tile(columns), columns, **flags) for columns in EXAMPLE_COLUMNS
    )


def _backward_examples(centred: bool) -> tuple[Any, ...]:
    types = _BACKWARD.format(bias="*fp32" if centred else "None", mean="*fp32" if centred else "None")
    flags = {"CENTRED": centred, "HAS_RESIDUAL": True, "HAS_WEIGHT": True, "HAS_GRAD": True, "HAS_GRAD_WEIGHT": True}
    flags |= {"HAS_GRAD_BIAS": centred, "STEPS": 32}
    return tuple(
        example(norm_backward_kernel, types, row_tile(columns), columns, **flags) for columns in EXAMPLE_COLUMNS
    )


FUSED = (
    FusedKernel(
        add_rms_norm_backward,
        why_not_add_rms_norm_backward,
        (
            Form(_added_backward, lambda like: {"weight_shape": _kept_dims(like)}),
            Form(_alone_backward, lambda like: {"weight_shape": _kept_dims(like), "residual_grad": None}),
            Form(_whole_added_backward, lambda like: {"weight_shape": [like.shape[-1]]}),
        ),
        _backward_examples(centred=False),
    ),
    FusedKernel(
        add_layer_norm_backward,
        why_not_add_layer_norm_backward,
        (Form(_layer_added_backward),),
        _backward_examples(centred=True),
    ),
    FusedKernel(
        add_rms_norm,
        why_not_add_rms_norm,
        (Form(_add_written_out), Form(_add_whole)),
        forward_examples(centred=False),
    ),
    FusedKernel(add_layer_norm, why_not_add_layer_norm, (Form(_add_layer),), forward_examples(centred=True)),
    FusedKernel(
        rms_norm, why_not_rms_norm, (Form(written_out, lambda like: {"normalized_shape": [like.shape[-1]]}),), ()
    ),
)
