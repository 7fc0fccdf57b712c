"""Rewrites of layer norm, RMS norm and group norm, which sum the moments of each row over ranks if rows are split.

With m elements x of a row (over all ranks), weight w, bias b and gradient g of the result:

    n = (x - mean) rstd,  rstd = 1 / sqrt(mean((x - mean)^2) + eps);  y = n w + b       (RMS norm has mean = 0, b = 0)
    dx = rstd (g w - sum(g w) / m - n sum(g w n) / m)                                   (RMS norm has no second term)
    dw = sum over rows of g n,  db = sum over rows of g

Each public function takes operands of the global call, for shapes and dtypes, and returns the rewrite for its rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from autoshard.rules.dims import tensors
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Rewrite
from autoshard.rules.split_dims import converted, is_any_split, moments, reduce_over, total, wide

aten = torch.ops.aten


def _width(ndim: int) -> tuple[list[int], tuple[str, ...]]:
    return list(range(-ndim, 0)), tuple(f"n{index}" for index in range(ndim))


def _count(x: torch.Tensor, ndim: int) -> int:
    return math.prod(x.shape[x.dim() - ndim :])


def _statistics_dtype(x: torch.Tensor, weights: Sequence[torch.Tensor | None]) -> torch.dtype:
    """Return the dtype of the mean and the inverse deviation that ATen returns.

    On CPUs it is the operand's dtype, unless a weight has another dtype. In all other cases, it is float32 for 16-bit
    floats and the operand's dtype for wider floats.
    """
    is_mixed = any(weight.dtype != x.dtype for weight in tensors(*weights))
    return wide(x.dtype) if is_mixed or x.device.type != "cpu" else x.dtype


def _promoted(x: torch.Tensor, weights: Sequence[torch.Tensor | None]) -> torch.dtype:
    """Return the dtype of a product of `weights` and normalised elements of `x`, at least float32."""
    return reduce(torch.promote_types, (weight.dtype for weight in tensors(*weights)), wide(x.dtype))


def layer_norm(like: torch.Tensor, ndim: int, weights: Sequence[torch.Tensor | None]) -> Rewrite:
    """Return the rewrite of `native_layer_norm` over the last `ndim` dims of the operand `like`."""
    (dims, factors), count = _width(ndim), _count(like, ndim)
    dtype, kept, made = like.dtype, _statistics_dtype(like, weights), _promoted(like, weights)

    def local(context: LocalContext, x: Any, normalized: Any, weight: Any, bias: Any, eps: float) -> Any:
        if not is_any_split(context, factors):
            return context.default(x, normalized, weight, bias, eps)
        mean, centred, squares = moments(context, converted(context, x, dtype, wide(dtype)), dims, factors, count)
        rstd = _inverse_root(context, squares, count, eps)
        result = _affine(context, context.call(aten.mul.Tensor, centred, rstd), weight, bias)
        return (
            converted(context, result, made, dtype),
            converted(context, mean, wide(dtype), kept),
            converted(context, rstd, wide(dtype), kept),
        )

    return local


def rms_norm(like: torch.Tensor, ndim: int, weight: torch.Tensor | None) -> Rewrite:
    """Return the rewrite of `_fused_rms_norm` over the last `ndim` dims of the operand `like`."""
    (dims, factors), count = _width(ndim), _count(like, ndim)
    dtype, made = like.dtype, _promoted(like, [weight])

    def local(context: LocalContext, x: Any, normalized: Any, weight: Any, eps: float | None) -> Any:
        if not is_any_split(context, factors):
            return context.default(x, normalized, weight, eps)
        x = converted(context, x, dtype, wide(dtype))
        squares = total(context, context.call(aten.mul.Tensor, x, x), dims, factors)
        rstd = _inverse_root(context, squares, count, torch.finfo(wide(dtype)).eps if eps is None else eps)
        result = _affine(context, context.call(aten.mul.Tensor, x, rstd), weight, None)
        return converted(context, result, made, dtype), rstd

    return local


def _inverse_root(context: LocalContext, squares: Any, count: int, eps: float) -> Any:
    variance = context.call(aten.div.Scalar, squares, count)
    return context.call(aten.rsqrt.default, context.call(aten.add.Scalar, variance, eps))


def _affine(context: LocalContext, normal: Any, weight: Any, bias: Any) -> Any:
    result = normal if weight is None else context.call(aten.mul.Tensor, normal, weight)
    return result if bias is None else context.call(aten.add.Tensor, result, bias)


def layer_norm_backward(like: torch.Tensor, ndim: int, weight: torch.Tensor | None) -> Rewrite:
    """Return the rewrite of `native_layer_norm_backward` over the last `ndim` dims of the operand `like`."""
    _, factors = _width(ndim)
    dtypes = (like.dtype, *[like.dtype if weight is None else weight.dtype] * 2)
    made = _promoted(like, [weight])

    def local(
        context: LocalContext, grad: Any, x: Any, normalized: Any, mean: Any, rstd: Any, weight: Any, bias: Any,
        output_mask: Sequence[bool],
    ) -> Any:  # fmt: skip
        if not is_any_split(context, factors):
            return context.default(grad, x, normalized, mean, rstd, weight, bias, output_mask)
        x = context.call(aten.sub.Tensor, converted(context, x, dtypes[0], wide(dtypes[0])), mean)
        return _row_gradients(context, like, ndim, (grad, x, rstd, weight), dtypes, made, output_mask, is_centred=True)

    return local


def rms_norm_backward(like: torch.Tensor, ndim: int, weight: torch.Tensor | None) -> Rewrite:
    """Return the rewrite of `_fused_rms_norm_backward` over the last `ndim` dims of the operand `like`."""
    _, factors = _width(ndim)
    dtypes = (like.dtype, like.dtype if weight is None else weight.dtype)
    made = _promoted(like, [weight])

    def local(
        context: LocalContext, grad: Any, x: Any, normalized: Any, rstd: Any, weight: Any, output_mask: Sequence[bool]
    ) -> Any:
        if not is_any_split(context, factors):
            return context.default(grad, x, normalized, rstd, weight, output_mask)
        x = converted(context, x, dtypes[0], wide(dtypes[0]))
        return _row_gradients(context, like, ndim, (grad, x, rstd, weight), dtypes, made, output_mask, is_centred=False)

    return local


def _row_gradients(
    context: LocalContext, like: torch.Tensor, ndim: int, operands: tuple[Any, Any, Any, Any],
    dtypes: Sequence[torch.dtype], made: torch.dtype, output_mask: Sequence[bool], *, is_centred: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Emit the gradients of operand, weight and bias, or None where `output_mask` does not ask for them.

    Args:
        like: the operand of the global call.
        operands: the result's gradient, the operand (centred for layer norm), rstd, and the weight or None.
        dtypes: the dtype of each gradient, two for RMS norm and three for layer norm.
        made: the dtype of products with the weight.
    """
    call, (dims, factors) = context.call, _width(ndim)
    grad, x, rstd, weight = operands
    grad = converted(context, grad, dtypes[0], wide(dtypes[0]))
    normal = call(aten.mul.Tensor, x, rstd)
    found: list[Any] = [None] * len(dtypes)
    if output_mask[0]:
        weighted = grad if weight is None else call(aten.mul.Tensor, grad, weight)
        found[0] = _operand_gradient(
            context, weighted, normal, rstd, (dims, factors, _count(like, ndim)), is_centred=is_centred
        )
    rows = list(range(like.dim() - ndim))
    if output_mask[1]:
        found[1] = _sum_of_rows(context, call(aten.mul.Tensor, grad, normal), rows)
    if len(found) > 2 and output_mask[2]:
        found[2] = _sum_of_rows(context, grad, rows)
    return _all_converted(context, found, (made, *[wide(dtypes[0])] * 2), dtypes)


def _all_converted(
    context: LocalContext, values: Sequence[Any], sources: Sequence[torch.dtype], targets: Sequence[torch.dtype]
) -> tuple[Any, ...]:
    """Emit the conversion of each value from its dtype in `sources` to its dtype in `targets`. None stays None."""
    rows = zip(values, sources, targets, strict=False)
    return tuple(None if value is None else converted(context, value, source, to) for value, source, to in rows)


def _operand_gradient(
    context: LocalContext, weighted: Any, normal: Any, rstd: Any, over: tuple[list[int], Sequence[str], int],
    *, is_centred: bool,
) -> Any:  # fmt: skip
    """Emit dx = rstd (g w - sum(g w) / m - n sum(g w n) / m), without the second term unless `is_centred`.

    `weighted` is g w, and `normal` is n. `over` has the dims of a row, their factors, and m, the number of elements of
    a row over all ranks.
    """
    call, (dims, factors, count) = context.call, over
    along = call(aten.sum.dim_IntList, call(aten.mul.Tensor, weighted, normal), dims, True)
    if is_centred:
        both = call(aten.stack.default, [along, call(aten.sum.dim_IntList, weighted, dims, True)])
        both = call(aten.div.Scalar, reduce_over(context, both, "sum", factors), count)
        along = call(aten.select.int, both, 0, 0)
        weighted = call(aten.sub.Tensor, weighted, call(aten.select.int, both, 0, 1))
    else:
        along = call(aten.div.Scalar, reduce_over(context, along, "sum", factors), count)
    return call(aten.mul.Tensor, call(aten.sub.Tensor, weighted, call(aten.mul.Tensor, normal, along)), rstd)


def _sum_of_rows(context: LocalContext, value: Any, rows: list[int]) -> Any:
    return context.call(aten.sum.dim_IntList, value, rows) if rows else value


# Groups of channels.


def group_norm(like: torch.Tensor, weights: Sequence[torch.Tensor | None], space: Sequence[str]) -> Rewrite:
    """Return the rewrite of `native_group_norm` for the operand `like`. `space` has the factors of spatial dims."""
    dtype, kept, made = like.dtype, _statistics_dtype(like, weights), _promoted(like, weights)

    def local(
        context: LocalContext, x: Any, weight: Any, bias: Any, n: int, c: int, hxw: int, group: int, eps: float
    ) -> Any:
        shape, groups = context.input_shape(0), context.local_size("g")
        if not is_any_split(context, space):
            return context.default(x, weight, bias, *shape[:2], hxw, groups, eps)
        rows, count = [shape[0], groups], c // group * hxw
        x = context.call(aten.reshape.default, converted(context, x, dtype, wide(dtype)), _by_group(shape, groups))
        mean, centred, squares = moments(context, x, [2], space, count)
        rstd = _inverse_root(context, squares, count, eps)
        normal = context.call(aten.reshape.default, context.call(aten.mul.Tensor, centred, rstd), shape)
        weight, bias = (_per_channel(context, value, shape) for value in (weight, bias))
        found = (_affine(context, normal, weight, bias), mean, rstd)
        result, *statistics = _all_converted(context, found, (made, *[wide(dtype)] * 2), (dtype, kept, kept))
        return result, *(context.call(aten.reshape.default, value, rows) for value in statistics)

    return local


def group_norm_backward(like: torch.Tensor, weight: torch.Tensor | None, space: Sequence[str]) -> Rewrite:
    """Return the rewrite of `native_group_norm_backward`. `like` and `space` are those of `group_norm`."""
    dtype, of_weights = like.dtype, like.dtype if weight is None else weight.dtype
    made = _promoted(like, [weight])

    def local(
        context: LocalContext, grad: Any, x: Any, mean: Any, rstd: Any, weight: Any,
        n: int, c: int, hxw: int, group: int, output_mask: Sequence[bool],
    ) -> Any:  # fmt: skip
        call, shape, groups = context.call, context.input_shape(1), context.local_size("g")
        if not is_any_split(context, space):
            return context.default(grad, x, mean, rstd, weight, *shape[:2], hxw, groups, output_mask)
        rows = [shape[0], groups]
        mean, rstd = (call(aten.reshape.default, value, [*rows, 1]) for value in (mean, rstd))
        grad, x = (converted(context, value, dtype, wide(dtype)) for value in (grad, x))
        x = call(aten.reshape.default, x, _by_group(shape, groups))
        normal = call(aten.mul.Tensor, call(aten.sub.Tensor, x, mean), rstd)
        found: list[Any] = [None, None, None]
        if output_mask[0]:
            weighted = _affine(context, grad, _per_channel(context, weight, shape), None)
            weighted = call(aten.reshape.default, weighted, _by_group(shape, groups))
            over = ([2], space, c // group * hxw)
            of_x = _operand_gradient(context, weighted, normal, rstd, over, is_centred=True)
            found[0] = call(aten.reshape.default, of_x, shape)
        elements = [0, *range(2, len(shape))]
        if output_mask[1]:
            normal = call(aten.reshape.default, normal, shape)
            found[1] = _sum_of_rows(context, call(aten.mul.Tensor, grad, normal), elements)
        if output_mask[2]:
            found[2] = _sum_of_rows(context, grad, elements)
        return _all_converted(context, found, (made, *[wide(dtype)] * 2), (dtype, of_weights, of_weights))

    return local


def _by_group(shape: Sequence[int], groups: int) -> list[int]:
    """Return the shape with a row for each group of channels, given the local shape. The batch may be empty."""
    return [shape[0], groups, math.prod(shape[1:]) // groups]


def _per_channel(context: LocalContext, value: Any, shape: Sequence[int]) -> Any:
    """Emit a reshape of a vector of all channels, so that it broadcasts to `shape`. None stays None."""
    if value is None:
        return None
    return context.call(aten.reshape.default, value, [1, shape[1], *[1] * (len(shape) - 2)])
