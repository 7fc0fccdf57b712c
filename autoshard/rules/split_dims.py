"""Local forms of operators that need a dim whole, on pieces of the dim.

Ranks exchange only small summaries: the maximum of a row, its sum, the last element of a scan. Each function here
computes the operator's result for the whole, by reducing or gathering the summaries of the ranks that split the dim.
Padding has the rules' fill values: 0 for sums, the smallest number for maxima.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from autoshard.rules.carries import meaningful
from autoshard.rules.dims import is_additive, named, normal_dim
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Carry, Fill, Rewrite, Rule

aten = torch.ops.aten

_TRAVELLING = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)


def split_along(
    x: torch.Tensor, dim: int, local: Rewrite, fill: Fill, *, operands: int = 1, is_linear: bool = False,
    carries: Sequence[Carry] = (), is_even: bool = False,
) -> Rule:  # fmt: skip
    """The rule of an operator along one dim, which may be split.

    Args:
        x: an operand; all operands and the result have its shape.
        dim: the dim.
        local: the rewrite; it takes the factor of the dim as the keyword `factor`.
        fill: padding value.
        operands: number of operands.
        is_linear: whether the operator is linear in the first operand.
        carries: other partial values that pass through.
        is_even: whether the dim may only be split evenly.
    """
    dims = named(max(x.dim(), 1))
    (factor,) = dims[normal_dim(dim, len(dims))]
    dims = dims[: x.dim()]
    return Rule(
        ((dims,) * operands, (dims,)),
        linear=[(0,)] if is_linear and is_additive(x) else (),
        exchanged={factor: 1},
        local=partial(local, factor=factor),
        padding={factor: fill},
        even=[factor] if is_even else (),
        carries=meaningful([x], carries),
    )


def can_travel(*dtypes: torch.dtype) -> bool:
    """Whether collectives accept these element types."""
    return _TRAVELLING.issuperset(dtypes)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for statistics of a row."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def is_any_split(context: LocalContext, factors: Iterable[str]) -> bool:
    """Whether pieces of some of the factors are on different ranks."""
    return any(context.shards(factor) > 1 for factor in factors)


def converted(context: LocalContext, value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """A value of dtype `source` in dtype `target`."""
    return value if source == target else context.call(aten._to_copy.default, value, dtype=target)


def reduce_over(context: LocalContext, value: Any, reduction: str, factors: Iterable[str]) -> Any:
    """Reduce the values of all ranks with pieces of some factors."""
    for factor in factors:
        value = context.all_reduce(value, reduction, factor) if context.shards(factor) > 1 else value
    return value


def total(context: LocalContext, value: Any, dims: Sequence[int], factors: Iterable[str]) -> Any:
    """The sum over `dims`, kept with size one; `factors` are the split factors of these dims."""
    return reduce_over(context, context.call(aten.sum.dim_IntList, value, list(dims), True), "sum", factors)


def log_sum_exp(context: LocalContext, of_pieces: Any, factors: Sequence[str]) -> Any:
    """log sum exp of the whole from those of the pieces, l_i: m + log(sum_i exp(l_i - m)), with m = max_i l_i or 0."""
    call = context.call
    top = reduce_over(context, of_pieces, "max", factors)
    top = call(aten.masked_fill.Scalar, top, call(aten.isinf.default, top), 0)
    sums = reduce_over(context, call(aten.exp.default, call(aten.sub.Tensor, of_pieces, top)), "sum", factors)
    return call(aten.add.Tensor, call(aten.log.default, sums), top)


def softmax(context: LocalContext, x: Any, dim: int, factor: str, *, is_log: bool, is_safe: bool = False) -> Any:
    """Softmax along a split dim, or its logarithm; `is_safe`: zeros where the whole row is minus infinity."""
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
    """y (g - sum(g y)) of a softmax y; g - exp(y) sum(g) of its logarithm y."""
    call = context.call
    if is_log:
        sums = total(context, grad, [dim], [factor])
        return call(aten.sub.Tensor, grad, call(aten.mul.Tensor, call(aten.exp.default, output), sums))
    sums = total(context, call(aten.mul.Tensor, grad, output), [dim], [factor])
    return call(aten.mul.Tensor, call(aten.sub.Tensor, grad, sums), output)


def moments(
    context: LocalContext, x: Any, dims: Sequence[int], factors: Sequence[str], count: int, *, operand: int = 0
) -> tuple[Any, Any, Any]:
    """Mean, centred elements, and the sum of their squares, in two passes; dims are kept with size one.

    Args:
        context: the place of the rank.
        x: its piece, with zeros in padding, in the dims of the rule's `operand`.
        dims: dims over which moments are taken.
        factors: factors of `dims`.
        count: the number of elements over all ranks.
        operand: index of the operand with the dims of `x`.

    Returns:
        The three tensors. Centred elements are zero in padding.
    """
    mean = context.call(aten.div.Scalar, total(context, x, dims, factors), count)
    centred = without_padding(context, context.call(aten.sub.Tensor, x, mean), factors, operand)
    return mean, centred, total(context, context.call(aten.mul.Tensor, centred, centred), dims, factors)


def without_padding(context: LocalContext, value: Any, factors: Iterable[str], operand: int = 0) -> Any:
    """A value with the dims of an operand, with zeros in the padding of `factors`."""
    for factor in factors:
        if context.global_size(factor) % context.shards(factor):
            value = context.fill(value, operand, factor, 0)
    return value


def variance(
    context: LocalContext, x: Any, dims: Sequence[int], factors: Sequence[str], count: int, correction: float,
    *, is_root: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Variance (or its root) and mean over some dims, kept with size one."""
    mean, _, squares = moments(context, x, dims, factors, count)
    result = context.call(aten.div.Scalar, squares, max(0, count - correction))
    return context.call(aten.sqrt.default, result) if is_root else result, mean


def first_extreme(context: LocalContext, op: Any, x: Any, dim: int, keepdim: bool, factor: str) -> tuple[Any, Any]:
    """Value and index of the first extreme along a split dim; `op` is `max.dim` or `min.dim`.

    The operator itself selects the first extreme, or NaN, among the pieces' extremes in order.
    """
    call = context.call
    own = call(op, x, dim, keepdim)
    values = context.all_gather(own[0], factor)
    indices = context.all_gather(call(aten.add.Scalar, own[1], context.offset(factor)), factor)
    best = call(op, values, 0, True)
    return call(aten.squeeze.dim, best[0], 0), call(aten.squeeze.dim, call(aten.gather.default, indices, 0, best[1]), 0)


def scan(context: LocalContext, scanned: Any, dim: int, factor: str, dtype: torch.dtype, *, is_product: bool) -> Any:
    """Running sums or products of the whole from those of the pieces, combined with the total before each piece.

    Args:
        context: the place of the rank.
        scanned: the running sums of the rank's piece.
        dim: the dim of the scan, split by `factor`.
        dtype: type of the result.
        is_product: products instead of sums.
    """
    call = context.call
    last = call(aten.narrow.default, scanned, dim, context.local_size(factor) - 1, 1)
    before = call(aten.narrow.default, context.all_gather(last, factor), 0, 0, context.index(factor))
    if is_product:
        return call(aten.mul.Tensor, scanned, call(aten.prod.dim_int, before, 0, dtype=dtype))
    return call(aten.add.Tensor, scanned, call(aten.sum.dim_IntList, before, [0], dtype=dtype))
