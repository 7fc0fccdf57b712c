"""The calls that the norms of `triton_norms.py` replace: a norm, the additions before it, and their gradients.

A norm is torch's, or the RMS norm of transformers. The latter has pow, mean, rsqrt and mul in float32. It casts other
dtypes before and after.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoshard.kernels.kernel import Form, FusedKernel
from autoshard.kernels.triton_norms import (
    add_layer_norm,
    add_layer_norm_backward,
    add_rms_norm,
    add_rms_norm_backward,
    bias_add_layer_norm,
    bias_add_rms_norm,
    rms_norm,
)

_aten = torch.ops.aten


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


def _items(results: Any, count: int) -> tuple[Any, ...]:
    return tuple(operator.getitem(results, index) for index in range(count))


# Norms of `total`: out, the statistics, and `total`.


def _written_out(like: Tensor, total: Any, weight: Any, eps: Any) -> tuple[Any, ...]:
    """Return the RMS norm of transformers, weight (x rsqrt(mean(x^2) + eps)), the rsqrt, and x = `total`."""
    x = _wide(like, total)
    mean = _aten.mean.dim(_aten.pow.Tensor_Scalar(x, 2), [-1], True)
    rstd = _aten.rsqrt.default(_aten.add.Tensor(mean, eps))
    return _aten.mul.Tensor(weight, _narrow(like, _aten.mul.Tensor(x, rstd))), rstd, total


def _whole(like: Tensor, total: Any, weight: Any, eps: Any) -> tuple[Any, ...]:
    return *_items(_aten._fused_rms_norm.default(total, [like.shape[-1]], weight, eps), 2), total


def _layer(like: Tensor, total: Any, weight: Any, bias: Any, eps: Any) -> tuple[Any, ...]:
    return *_items(_aten.native_layer_norm.default(total, [like.shape[-1]], weight, bias, eps), 3), total


# Sums with a bias.


def _reshaped_sum(like: Tensor, x: Any, x_bias: Any, residual: Any) -> Any:
    """Add the bias to x [rows, columns], reshape the sum to the shape of `like`, and add the residual."""
    biased = _aten.reshape.default(_aten.add.Tensor(x, x_bias), list(like.shape))
    return _aten.add.Tensor(biased, residual)


def _sum(like: Tensor, x: Any, x_bias: Any, residual: Any) -> Any:
    return _aten.add.Tensor(_aten.add.Tensor(x, x_bias), residual)


_SUMS = (_reshaped_sum, _sum)


def _add_rms(norm: Callable[..., Any]) -> Form:
    return Form(lambda like, x, residual, weight, eps: norm(like, _aten.add.Tensor(x, residual), weight, eps))


def _bias_add_rms(norm: Callable[..., Any], total: Callable[..., Any]) -> Form:
    return Form(
        lambda like, x, x_bias, residual, weight, eps: norm(like, total(like, x, x_bias, residual), weight, eps)
    )


def _add_layer(like: Tensor, x: Any, residual: Any, weight: Any, bias: Any, eps: Any) -> tuple[Any, ...]:
    return _layer(like, _aten.add.Tensor(x, residual), weight, bias, eps)


def _bias_add_layer(total: Callable[..., Any]) -> Form:
    def compose(like: Tensor, x: Any, x_bias: Any, residual: Any, weight: Any, bias: Any, eps: Any) -> tuple[Any, ...]:
        return _layer(like, total(like, x, x_bias, residual), weight, bias, eps)

    return Form(compose)


def _alone(like: Tensor, input: Any, weight: Any, eps: Any) -> tuple[Any, ...]:
    return _written_out(like, input, weight, eps)[:2]


# Gradients.


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


def _whole_added_backward(
    like: Tensor, grad_out: Any, residual_grad: Any, input: Any, rstd: Any, weight: Any
) -> tuple[Any, Any]:
    arguments = (grad_out, input, [like.shape[-1]], rstd, weight, [True, True])
    grad, grad_weight = _items(_aten._fused_rms_norm_backward.default(*arguments), 2)
    return _aten.add.Tensor(residual_grad, grad), grad_weight


def _layer_added_backward(
    like: Tensor, grad_out: Any, residual_grad: Any, input: Any, mean: Any, rstd: Any, weight: Any, bias: Any
) -> tuple[Any, ...]:
    arguments = (grad_out, input, [like.shape[-1]], mean, rstd, weight, bias, [True, True, True])
    grad, *others = _items(_aten.native_layer_norm_backward.default(*arguments), 3)
    return _aten.add.Tensor(residual_grad, grad), *others


def _kept_dims(like: Tensor) -> list[int]:
    return [*[1] * (like.dim() - 1), like.shape[-1]]


FUSED = (
    FusedKernel(bias_add_layer_norm, tuple(map(_bias_add_layer, _SUMS))),
    FusedKernel(
        bias_add_rms_norm, tuple(_bias_add_rms(norm, total) for norm in (_written_out, _whole) for total in _SUMS)
    ),
    FusedKernel(
        add_rms_norm_backward,
        (
            Form(_added_backward, lambda like: {"weight_shape": _kept_dims(like)}),
            Form(_alone_backward, lambda like: {"weight_shape": _kept_dims(like), "residual_grad": None}),
            Form(_whole_added_backward, lambda like: {"weight_shape": [like.shape[-1]]}),
        ),
    ),
    FusedKernel(add_layer_norm_backward, (Form(_layer_added_backward),)),
    FusedKernel(add_rms_norm, (_add_rms(_written_out), _add_rms(_whole))),
    FusedKernel(add_layer_norm, (Form(_add_layer),)),
    FusedKernel(rms_norm, (Form(_alone, lambda like: {"normalized_shape": [like.shape[-1]]}),)),
)
