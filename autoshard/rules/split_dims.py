"""Functions for rewrites of operators that need every element of a dim, if the dim is split.

Ranks exchange only small summaries: the maximum of a row, its sum, the last element of a scan. Padding has the fill
values of the rules: 0 for sums, the smallest number for maxima.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from autoshard.ir.reduction import REDUCIBLE
from autoshard.rules.dims import named, normal_dim
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Fill, Rewrite, Rule

aten = torch.ops.aten


def split_along(
    x: torch.Tensor, dim: int, local: Rewrite, fill: Fill, *, operands: int = 1, is_linear: bool = False,
    is_even: bool = False,
) -> Rule:  # fmt: skip
    """Return the rule of an operator along dim `dim`, which may be split. All tensors have the shape of `x`.

    Args:
        local: the rewrite. It takes the factor of the dim as the keyword `factor`.
        fill: the fill value of padding along the dim.
        operands: the number of tensor operands.
        is_linear: whether the operator is linear in the first operand.
        is_even: whether the dim may only be split evenly.
    """
    dims = named(max(x.dim(), 1))
    (factor,) = dims[normal_dim(dim, len(dims))]
    dims = dims[: x.dim()]
    return Rule(
        ((dims,) * operands, (dims,)),
        linear=[(0,)] if is_linear else (),
        exchanged={factor: 1},
        local=partial(local, factor=factor),
        padding={factor: fill},
        even=[factor] if is_even else (),
    )


def can_travel(*dtypes: torch.dtype) -> bool:
    """Whether collectives accept tensors of these dtypes."""
    return REDUCIBLE.issuperset(dtypes)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for statistics of a row of `dtype`: float32 for 16-bit floats, else `dtype` itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def is_any_split(context: LocalContext, factors: Iterable[str]) -> bool:
    """Whether some of the factors is split into more than one piece."""
    return any(context.shards(factor) > 1 for factor in factors)


def converted(context: LocalContext, value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Emit the conversion of a value from dtype `source` to `target`; return `value` itself if they are equal."""
    return value if source == target else context.call(aten._to_copy.default, value, dtype=target)


def reduce_over(context: LocalContext, value: Any, reduction: str, factors: Iterable[str]) -> Any:
    """Emit all-reduces of `value` over the ranks that split the factors, and return the reduced value."""
    for factor in factors:
        value = context.all_reduce(value, reduction, factor) if context.shards(factor) > 1 else value
    return value


def total(context: LocalContext, value: Any, dims: Sequence[int], factors: Iterable[str]) -> Any:
    """Emit the sum of `value` over `dims` of all ranks' pieces. The dims stay with size one.

    `factors` are the factors of these dims.
    """
    return reduce_over(context, context.call(aten.sum.dim_IntList, value, list(dims), True), "sum", factors)


def log_sum_exp(context: LocalContext, of_pieces: Any, factors: Sequence[str]) -> Any:
    """Emit the log-sum-exp of whole rows, given `of_pieces`, the log-sum-exp l_i of each rank's piece.

    It is m + log(sum_i exp(l_i - m)) with m = max_i l_i. An infinite m is replaced by 0.
    """
    call = context.call
    top = reduce_over(context, of_pieces, "max", factors)
    top = call(aten.masked_fill.Scalar, top, call(aten.isinf.default, top), 0)
    sums = reduce_over(context, call(aten.exp.default, call(aten.sub.Tensor, of_pieces, top)), "sum", factors)
    return call(aten.add.Tensor, call(aten.log.default, sums), top)


def softmax(context: LocalContext, x: Any, dim: int, factor: str, *, is_log: bool, is_safe: bool = False) -> Any:
    """Emit softmax along a split dim, or log-softmax. With `is_safe`, a row of minus infinities gives zeros."""
    call = context.call
    top = context.all_reduce(call(aten.amax.default, x, [dim], True), "max", factor)
    shifted = call(aten.sub.Tensor, x, top)
    exponentials = call(aten.exp.default, shifted)
    sums = total(context, exponentials, [dim], [factor])
    if is_log:
        return call(aten.sub.Tensor, shifted, call(aten.log.default, sums))
    result = call(aten.div.Tensor, exponentials, sums)
    if not is_safe:
        return result
    return call(aten.masked_fill.Scalar, result, call(aten.eq.Scalar, top, -math.inf), 0)


def softmax_backward(context: LocalContext, grad: Any, output: Any, dim: int, factor: str, *, is_log: bool) -> Any:
    """Emit the gradient of the operand of softmax or log-softmax along a split dim.

    Let y be `output` and g be `grad`. The gradient is y (g - sum(g y)) for softmax, and g - exp(y) sum(g) for
    log-softmax.
    """
    call = context.call
    if is_log:
        sums = total(context, grad, [dim], [factor])
        return call(aten.sub.Tensor, grad, call(aten.mul.Tensor, call(aten.exp.default, output), sums))
    sums = total(context, call(aten.mul.Tensor, grad, output), [dim], [factor])
    return call(aten.mul.Tensor, call(aten.sub.Tensor, grad, sums), output)


def moments(
    context: LocalContext, x: Any, dims: Sequence[int], factors: Sequence[str], count: int
) -> tuple[Any, Any, Any]:
    """Emit mean, centred elements and the sum of their squares over some dims, in two passes over the piece.

    `dims` stay with size one in mean and sum. Centred elements are zero in padding.

    Args:
        x: the piece of the rank, with zeros in padding.
        factors: the factors of `dims`.
        count: the number of elements of `dims` over all ranks.
    """
    mean = context.call(aten.div.Scalar, total(context, x, dims, factors), count)
    centred = without_padding(context, context.call(aten.sub.Tensor, x, mean), factors, 0)
    return mean, centred, total(context, context.call(aten.mul.Tensor, centred, centred), dims, factors)


def without_padding(context: LocalContext, value: Any, factors: Iterable[str], operand: int = 0) -> Any:
    """Emit `value` with zeros in the padding of `factors`. `value` has the dims of operand number `operand`."""
    for factor in factors:
        if context.global_size(factor) % context.shards(factor):
            value = context.fill(value, operand, factor, 0)
    return value


def variance(
    context: LocalContext, x: Any, dims: Sequence[int], factors: Sequence[str], count: int, correction: float,
    *, is_root: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Emit variance (its root if `is_root`) and mean over `dims`, which stay with size one.

    `correction` is that of `torch.var`. The other arguments are those of `moments`.
    """
    mean, _, squares = moments(context, x, dims, factors, count)
    result = context.call(aten.div.Scalar, squares, max(0, count - correction))
    return context.call(aten.sqrt.default, result) if is_root else result, mean


def first_extreme(context: LocalContext, op: Any, x: Any, dim: int, keepdim: bool, factor: str) -> tuple[Any, Any]:
    """Emit value and global index of the first maximum or minimum along a split dim. `op` is `max.dim` or `min.dim`.

    `op` is applied to each piece, and then to the results of all pieces in order. So it selects NaN as on one device.
    """
    call = context.call
    own = call(op, x, dim, keepdim)
    values = context.all_gather(own[0], factor)
    indices = context.all_gather(call(aten.add.Scalar, own[1], context.offset(factor)), factor)
    best = call(op, values, 0, True)
    return call(aten.squeeze.dim, best[0], 0), call(aten.squeeze.dim, call(aten.gather.default, indices, 0, best[1]), 0)


def scan(context: LocalContext, scanned: Any, dim: int, factor: str, dtype: torch.dtype, *, is_product: bool) -> Any:
    """Emit cumulative sums or products along a split dim, from the sums or products `scanned` of the rank's own piece.

    The total of all earlier pieces is added to the rank's sums, or multiplied with the rank's products. `dtype` is the
    dtype of `scanned`.
    """
    call = context.call
    last = call(aten.narrow.default, scanned, dim, context.local_size(factor) - 1, 1)
    before = call(aten.narrow.default, context.all_gather(last, factor), 0, 0, context.index(factor))
    if is_product:
        return call(aten.mul.Tensor, scanned, call(aten.prod.dim_int, before, 0, dtype=dtype))
    return call(aten.add.Tensor, scanned, call(aten.sum.dim_IntList, before, [0], dtype=dtype))
