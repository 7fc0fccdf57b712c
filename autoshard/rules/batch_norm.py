"""Rules of batch normalisation.

Channels are independent. In training, the statistics of a channel are those of the global batch on every mesh. If batch
or spatial dims are split, the rewrite all-reduces means and variances over the ranks. In evaluation, elements are
independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autoshard.rules.dims import all_blocked, named, names
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Dims, Rewrite, Rule
from autoshard.rules.registry import sharding_rule, tensor_operands
from autoshard.rules.split_dims import moments, reduce_over, wide

aten = torch.ops.aten

_CHANNELS: Dims = (("c",),)


def _x_dims(x: torch.Tensor) -> Dims:
    return (("n",), ("c",), *named(x.dim() - 2, "s"))


def _elements(x: torch.Tensor) -> tuple[str, ...]:
    """Return the factors over which a channel's statistics are averaged: batch and spatial dims."""
    return names(dim for dim in _x_dims(x) if dim != ("c",))


@sharding_rule(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def batch_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, training: bool, momentum: float, eps: float,
) -> Rule | None:  # fmt: skip
    """Return the rule of a batch norm, or None if the call writes running statistics in place.

    Programs are functional, so they do not contain calls that write in place.
    """
    if training and running_mean is not None:
        return None
    return _forward(x, [weight, bias, running_mean, running_var], training, updates=False)


@sharding_rule(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_statistics(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, training: bool, momentum: float, eps: float
) -> Rule:
    return _forward(x, [weight, bias], training, updates=False)


@sharding_rule(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: torch.Tensor,
    running_var: torch.Tensor, training: bool, momentum: float, eps: float,
) -> Rule:  # fmt: skip
    return _forward(x, [weight, bias, running_mean, running_var], training, updates=True)


@sharding_rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm_in_evaluation(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: torch.Tensor,
    running_var: torch.Tensor, momentum: float, eps: float,
) -> Rule:  # fmt: skip
    return _forward(x, [weight, bias, running_mean, running_var], training=False, updates=False)


def _forward(x: torch.Tensor, others: Sequence[torch.Tensor | None], training: bool, *, updates: bool) -> Rule:
    """Return the rule of a forward of batch norm. `others` are weight and bias, then any running mean and variance.

    The results are the output, then the batch's mean and inverse deviation (both empty without `training`). With
    `updates`, the new running mean and variance follow.
    """
    dims = _x_dims(x)
    operands = (dims, *[_CHANNELS for tensor in others if tensor is not None])
    saved = _CHANNELS if training else all_blocked(1)
    results = (dims, saved, saved, *([_CHANNELS] * 2 if updates else []))
    whole = {**dict.fromkeys(_elements(x), range(1, len(results))), **({} if training else {"c": (1, 2)})}
    held = None if len(others) == 2 or others[2] is None else others[2].dtype
    dtypes = _Types(x.dtype, _saved(x, others), held)
    local = partial(_local_forward, dtypes=dtypes, updates=updates, elements=_elements(x))
    return Rule((operands, results), whole=whole, local=local if training else None)


def _saved(x: torch.Tensor, others: Sequence[torch.Tensor | None]) -> torch.dtype:
    """Return the dtype of the saved mean and inverse deviation.

    On a CPU it is the dtype of `x`, unless a parameter is wider. On other devices it is the dtype of the statistics'
    computation, `wide(x.dtype)`.
    """
    is_wide = any(tensor is not None and tensor.dtype == wide(x.dtype) for tensor in others)
    return wide(x.dtype) if is_wide or x.device.type != "cpu" else x.dtype


@dataclass(frozen=True, slots=True)
class _Types:
    """Dtypes of a batch norm: of the operand `x`, of statistics `saved` for the backward, and of running statistics.

    `held`, the dtype of running statistics, is None if there are none.
    """

    x: torch.dtype
    saved: torch.dtype
    held: torch.dtype | None


def _local_forward(
    context: LocalContext, x: Any, weight: Any, bias: Any, *rest: Any, dtypes: _Types, updates: bool,
    elements: Sequence[str],
) -> Any:  # fmt: skip
    """Emit the forward in training, with statistics over `elements`, the factors of the global batch and spatial dims.

    `rest` has any running mean and variance, then training, momentum and eps.
    """
    if not any(map(context.is_split, elements)):
        return context.default(x, weight, bias, *rest)
    call, wider = context.call, wide(dtypes.x)

    def cast(value: Any, dtype: torch.dtype | None) -> Any:
        return value if value is None or wider is dtypes.x else call(aten._to_copy.default, value, dtype=dtype)

    *running, _, momentum, eps = rest
    over, count = [0, *range(2, len(context.input_shape(0)))], math.prod(map(context.global_size, elements))
    mean, _, squares = moments(context, cast(x, wider), over, elements, count)
    mean, variance = (
        call(aten.reshape.default, value, [-1]) for value in (mean, call(aten.div.Scalar, squares, count))
    )
    affine = (cast(weight, wider), cast(bias, wider))
    normalised = call(aten.native_batch_norm.default, x, *affine, mean, variance, False, 0.0, eps)
    invstd = call(aten.rsqrt.default, call(aten.add.Scalar, variance, eps))
    results = (normalised[0], cast(mean, dtypes.saved), cast(invstd, dtypes.saved))
    if not updates:
        return results
    unbiased = call(aten.mul.Scalar, variance, count / max(count - 1, 1))
    moved = (
        call(aten.lerp.Scalar, cast(old, wider), new, momentum)
        for old, new in zip(running, (mean, unbiased), strict=True)
    )
    return (*results, *(cast(new, dtypes.held) for new in moved))


def _per_channel(shape: Sequence[int]) -> list[int]:
    return [1, shape[1], *[1] * (len(shape) - 2)]


@sharding_rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, save_mean: torch.Tensor | None, save_invstd: torch.Tensor | None,
    train: bool, eps: float, output_mask: Sequence[bool],
) -> Rule:  # fmt: skip
    dims = _x_dims(x)
    statistics = [weight, running_mean, running_var, save_mean, save_invstd]
    present = [_CHANNELS if len(tensor) else all_blocked(1) for tensor in tensor_operands(statistics, {})]
    gradients = (dims, _CHANNELS, _CHANNELS)
    results = tuple(g for g, is_asked in zip(gradients, output_mask, strict=True) if is_asked)
    whole = dict.fromkeys(_elements(x), range(int(output_mask[0]), len(results))) if train else None
    return Rule(
        ((dims, dims, *present), results),
        reduce=dict.fromkeys(_elements(x), "sum"),
        whole=whole,
        linear=[(0,)],
        local=_local_backward(x, _saved(x, [save_mean]) if weight is None else weight.dtype) if train else None,
    )


def _local_backward(like: torch.Tensor, weight_dtype: torch.dtype) -> Rewrite:
    x_dtype, elements = like.dtype, _elements(like)

    def local(
        context: LocalContext, grad: Any, x: Any, weight: Any, running_mean: Any, running_var: Any,
        mean: Any, invstd: Any, train: bool, eps: float, output_mask: Sequence[bool],
    ) -> Any:  # fmt: skip
        """Emit the gradients of x, weight and bias, with sums over the global batch of `count` elements per channel.

        xhat    = (x - mean) invstd
        dweight = sum(g xhat),    dbias = sum(g)
        dx      = weight invstd (g - dbias / count - xhat dweight / count)
        """
        call = context.call
        if not any(map(context.is_split, elements)):
            statistics = (running_mean, running_var, mean, invstd)
            return context.default(grad, x, weight, *statistics, train, eps, output_mask)
        shape = context.input_shape(1)
        over, count = [0, *range(2, len(shape))], math.prod(map(context.global_size, elements))

        def per_channel(values: Any) -> Any:
            return call(aten.reshape.default, values, _per_channel(shape))

        def total(values: Any) -> Any:
            return reduce_over(context, call(aten.sum.dim_IntList, values, over), "sum", elements)

        if x_dtype is not wide(x_dtype):
            cast = partial(call, aten._to_copy.default, dtype=wide(x_dtype))
            grad, mean, invstd = cast(grad), cast(mean), cast(invstd)
        scale = per_channel(invstd)
        normal = call(aten.mul.Tensor, call(aten.sub.Tensor, x, per_channel(mean)), scale)
        weight_grad, bias_grad = total(call(aten.mul.Tensor, grad, normal)), total(grad)
        shares = [per_channel(call(aten.div.Scalar, whole, count)) for whole in (bias_grad, weight_grad)]
        x_grad = call(aten.sub.Tensor, call(aten.sub.Tensor, grad, shares[0]), call(aten.mul.Tensor, normal, shares[1]))
        if weight is not None:
            scale = call(aten.mul.Tensor, scale, per_channel(weight))
        x_grad = call(aten.mul.Tensor, x_grad, scale)
        dtypes = (x_dtype, weight_dtype, weight_dtype)
        return tuple(
            call(aten._to_copy.default, gradient, dtype=dtype) if is_asked else None
            for gradient, dtype, is_asked in zip((x_grad, weight_grad, bias_grad), dtypes, output_mask, strict=True)
        )

    return local
