"""Rules of operators that reduce, scan or sort dims.

A dim that is reduced by a sum, maximum, minimum or product may be split, and the result is then partial. Other
operators need every element of the dim. Some of them have a rewrite that exchanges a small summary between ranks, such
as argmax and variance (`autoshard.rules.split_dims`). The dims of the rest, such as sort and median, cannot be split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from autoshard.ir.spec import Reduction
from autoshard.rules import split_dims
from autoshard.rules.dims import (
    BLOCKED,
    keeps_sums,
    named,
    names,
    normal_dim,
    normal_dims,
    with_blocked,
    without,
)
from autoshard.rules.local import LocalContext, whole_to_piece
from autoshard.rules.notation import Fill, Rewrite, Rule
from autoshard.rules.registry import RuleFunction, sharding_rule
from autoshard.rules.split_dims import can_travel, converted, is_any_split, reduce_over, wide

aten = torch.ops.aten

DimList = int | Sequence[int] | None


def _reduction(
    x: torch.Tensor,
    dim: DimList,
    keepdim: bool,
    reduction: str,
    *,
    is_linear: bool = False,
    local: Rewrite | None = None,
    fill: Fill = None,
) -> Rule:
    """Return the rule of an operator that reduces the dims `dim` (None: all) by `reduction`.

    Args:
        is_linear: whether partial sums pass.
        local: the rewrite that emits the local calls, or None.
        fill: the fill value of padding that does not change the result. If it is None, `padding_of` decides.
    """
    dims, removed = named(x.dim()), _positions(x, dim)
    reduce = {factor: reduction for position in removed for factor in dims[position]}
    padding = {} if fill is None else dict.fromkeys(reduce, fill)
    sides = ((dims,), (without(dims, removed, keepdim=keepdim),))
    return Rule(sides, reduce=reduce, linear=[(0,)] if is_linear else (), local=local, padding=padding)


def _positions(x: torch.Tensor, dim: DimList) -> tuple[int, ...]:
    return normal_dims(dim, x.dim()) if x.dim() else ()


def _over_whole(x: torch.Tensor, dim: DimList, keepdim: bool, results: int = 1) -> Rule:
    dims = with_blocked(named(x.dim()), removed := _positions(x, dim))
    return Rule(((dims,), (without(dims, removed, keepdim=keepdim),) * results))


def _split_inside(
    x: torch.Tensor, dim: DimList, keepdim: bool, local: Rewrite, fill: Fill, *, results: int = 1,
    is_even: bool = False,
) -> Rule:  # fmt: skip
    """Return the rule of a reduction whose rewrite `local` communicates if reduced dims are split.

    `local` takes the factors of the reduced dims as the keyword `factors`. `fill` fills padding, and the operator has
    `results` results.
    """
    dims, removed = named(x.dim()), _positions(x, dim)
    factors = names(dims[position] for position in removed)
    return Rule(
        ((dims,), (without(dims, removed, keepdim=keepdim),) * results),
        whole=dict.fromkeys(factors, range(results)),
        local=partial(local, factors=factors),
        padding=dict.fromkeys(factors, fill),
        even=factors if is_even else (),
    )


# Reductions of addends.


@sharding_rule(aten.sum.default, aten.sum.dim_IntList)
def add_up(x: torch.Tensor, dim: DimList = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Rule:
    widened = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
    is_linear = keeps_sums(x.dtype, dtype or widened)
    return _reduction(x, dim, keepdim, "sum", is_linear=is_linear, fill=None if is_linear else 0)


@sharding_rule(aten.mean.default, aten.mean.dim)
def mean(x: torch.Tensor, dim: DimList = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Return the rule of a mean, whose rewrite multiplies a piece's mean by the piece's share of all elements."""
    reduced = names(named(x.dim())[position] for position in _positions(x, dim))

    def local(context: LocalContext, *args: Any, **kwargs: Any) -> Any:
        pieces = whole_to_piece(context, reduced)
        part = context.default(*args, **kwargs)
        return part if pieces == 1 else context.call(aten.div.Scalar, part, pieces)

    return _reduction(x, dim, keepdim, "sum", is_linear=True, local=local, fill=0)


def _reduces_by(reduction: str, fill: Fill, *operators: Any) -> None:
    @sharding_rule(*operators)
    def rule(x: torch.Tensor, dim: DimList = None, keepdim: bool = False, **kwargs: Any) -> Rule:
        return _reduction(x, dim, keepdim, reduction, fill=fill)


_reduces_by("sum", 0, aten.nansum.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
_reduces_by("max", Reduction.MAX, aten.amax.default, aten.max.default)
_reduces_by("min", Reduction.MIN, aten.amin.default, aten.min.default)
_reduces_by("product", 1, aten.prod.default, aten.prod.dim_int)


def _truth(reduction: str, fill: Fill, *operators: Any) -> None:
    @sharding_rule(*operators)
    def rule(x: torch.Tensor, dim: DimList = None, keepdim: bool = False) -> Rule:
        if dim in ([], ()):  # unlike other reductions, these reduce no dim
            return Rule(([dims := named(x.dim())], [dims]))
        return _reduction(x, dim, keepdim, reduction, fill=fill)


_truth("max", 0, aten.any.default, aten.any.dim, aten.any.dims)
_truth("min", 1, aten.all.default, aten.all.dim, aten.all.dims)


@sharding_rule(aten.norm.Scalar, aten.norm.ScalarOpt_dim)
def norm(x: torch.Tensor, p: float | None = 2, dim: DimList = None, keepdim: bool = False) -> Rule:
    return vector_norm(x, 2 if p is None else p, dim, keepdim)


@sharding_rule(aten.linalg_vector_norm.default)
def vector_norm(x: torch.Tensor, ord: float = 2, dim: DimList = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Return the rule of a norm of order `ord`.

    For the orders infinity, -infinity, 1 and 0, ranks reduce the norms of pieces. For other orders, ranks sum the
    norms' powers.
    """
    reduction = {math.inf: "max", -math.inf: "min", 1: "sum", 0: "sum"}.get(ord)
    if reduction is not None:
        return _reduction(x, dim, keepdim, reduction, fill=math.inf if reduction == "min" else 0)
    dims, removed = named(x.dim()), _positions(x, dim)
    reduced = names(dims[position] for position in removed)
    made = kwargs.get("dtype") or x.dtype.to_real()

    def local(context: LocalContext, *args: Any, **kwargs: Any) -> Any:
        """Emit the norm. Powers are computed in float32 for 16-bit dtypes, because they may overflow."""
        norm = context.default(*args, **kwargs)
        if not any(map(context.is_split, reduced)):
            return norm
        powers = context.call(aten.pow.Tensor_Scalar, converted(context, norm, made, wide(made)), ord)
        powers = reduce_over(context, powers, "sum", reduced)
        return converted(context, context.call(aten.pow.Tensor_Scalar, powers, 1 / ord), wide(made), made)

    sides = ((dims,), (without(dims, removed, keepdim=keepdim),))
    padding = dict.fromkeys(reduced, 0 if ord > 0 else math.inf)
    return Rule(sides, whole=dict.fromkeys(reduced, (0,)), local=local, padding=padding)


# Reductions that need their dims whole.


@sharding_rule(aten.median.default, aten.nanmedian.default)
def median(x: torch.Tensor) -> Rule:
    return _over_whole(x, None, False)


@sharding_rule(aten.median.dim, aten.nanmedian.dim, aten.mode.default)
def order_statistic(x: torch.Tensor, dim: int = -1, keepdim: bool = False) -> Rule:
    return _over_whole(x, dim, keepdim, results=2)


@sharding_rule(aten.kthvalue.default)
def kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Rule:
    return _over_whole(x, dim, keepdim, results=2)


def _extreme(op: Any, fill: Reduction) -> RuleFunction:
    def rule(x: torch.Tensor, dim: int, keepdim: bool = False) -> Rule:
        if not can_travel(x.dtype):
            return _over_whole(x, dim, keepdim, results=2)
        return _split_inside(x, dim, keepdim, local, fill, results=2)

    def local(context: LocalContext, x: Any, dim: int, keepdim: bool = False, *, factors: Sequence[str]) -> Any:
        if not is_any_split(context, factors):
            return context.default(x, dim, keepdim)
        return split_dims.first_extreme(context, op, x, dim, keepdim, *factors)

    return rule


sharding_rule(aten.max.dim)(_extreme(aten.max.dim, Reduction.MAX))
sharding_rule(aten.min.dim)(_extreme(aten.min.dim, Reduction.MIN))


@sharding_rule(aten.aminmax.default)
def aminmax(x: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> Rule:
    if not can_travel(x.dtype):
        return _over_whole(x, dim, keepdim, results=2)
    return _split_inside(x, dim, keepdim, _local_aminmax, None, results=2, is_even=True)


def _local_aminmax(
    context: LocalContext, x: Any, *, dim: int | None = None, keepdim: bool = False, factors: Sequence[str]
) -> Any:
    found = context.default(x, dim=dim, keepdim=keepdim)
    if not is_any_split(context, factors):
        return found
    return tuple(reduce_over(context, found[index], name, factors) for index, name in enumerate(("min", "max")))


def _arg_extreme(op: Any, fill: Reduction) -> RuleFunction:
    """Return the rule function of `argmax` or `argmin`, whose reduced dim may be split.

    `op` is `max.dim` or `min.dim`, and the identity of `fill` fills padding. Without `dim`, the flat indices of a
    matrix's pieces are not in order, so its dims cannot be split.
    """

    def rule(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Rule:
        if not can_travel(x.dtype) or (dim is None and x.dim() != 1):
            return _over_whole(x, dim, keepdim)
        return _split_inside(x, dim, keepdim, local, fill)

    def local(
        context: LocalContext, x: Any, dim: int | None = None, keepdim: bool = False, *, factors: Sequence[str]
    ) -> Any:
        if not is_any_split(context, factors):
            return context.default(x, dim, keepdim)
        return split_dims.first_extreme(context, op, x, dim or 0, keepdim, *factors)[1]

    return rule


sharding_rule(aten.argmax.default)(_arg_extreme(aten.max.dim, Reduction.MAX))
sharding_rule(aten.argmin.default)(_arg_extreme(aten.min.dim, Reduction.MIN))


@sharding_rule(aten.logsumexp.default)
def logsumexp(x: torch.Tensor, dim: DimList, keepdim: bool = False) -> Rule:
    """Return the rule of a log-sum-exp. It splits integers only evenly, as no integer in padding keeps the result."""
    if x.is_complex():
        return _over_whole(x, dim, keepdim)
    is_even = not x.is_floating_point()
    return _split_inside(x, dim, keepdim, _local_logsumexp, Reduction.MAX, is_even=is_even)


def _local_logsumexp(
    context: LocalContext, x: Any, dim: DimList, keepdim: bool = False, *, factors: Sequence[str]
) -> Any:
    found = context.default(x, dim, keepdim)
    return split_dims.log_sum_exp(context, found, factors) if is_any_split(context, factors) else found


def _variance(*, is_root: bool, results: int = 1) -> RuleFunction:
    """Return the rule function of variances, or of their roots. With `results` of 2, the mean is a result too."""

    def rule(x: torch.Tensor, dim: DimList = None, *, keepdim: bool = False, **kwargs: Any) -> Rule:
        if x.is_complex():
            return _over_whole(x, dim, keepdim, results)
        removed = _positions(x, dim)
        count, dtype = math.prod(x.shape[position] for position in removed), x.dtype

        def local(
            context: LocalContext, x: Any, dim: DimList = None, *, correction: float | None = None,
            keepdim: bool = False, factors: Sequence[str],
        ) -> Any:  # fmt: skip
            if not is_any_split(context, factors):
                return context.default(x, dim, correction=correction, keepdim=keepdim)
            x = converted(context, x, dtype, wide(dtype))
            unbiased = 1 if correction is None else correction
            found = split_dims.variance(context, x, removed, factors, count, unbiased, is_root=is_root)[:results]
            if not keepdim:
                found = [context.call(aten.squeeze.dims, value, list(removed)) for value in found]
            found = [converted(context, value, wide(dtype), dtype) for value in found]
            return found[0] if results == 1 else tuple(found)

        return _split_inside(x, dim, keepdim, local, 0, results=results)

    return rule


sharding_rule(aten.var.correction)(_variance(is_root=False))
sharding_rule(aten.std.correction)(_variance(is_root=True))
sharding_rule(aten.var_mean.correction)(_variance(is_root=False, results=2))
sharding_rule(aten.std_mean.correction)(_variance(is_root=True, results=2))


# Operators along one dim, which the result has too.


def _along(x: torch.Tensor, dim: int, operands: int = 1, results: int = 1, *, is_linear: bool = False) -> Rule:
    dims = with_blocked(named(x.dim()), [normal_dim(dim, x.dim())])
    linear = [(0,)] if is_linear else ()
    return Rule(((dims,) * operands, (dims,) * results), linear=linear)


def _scan(*, is_product: bool) -> RuleFunction:
    """Return the rule function of cumulative sums or products, whose dim may be split."""

    def rule(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Rule:
        is_number = x.is_floating_point() or x.is_complex()
        result = dtype or (x.dtype if is_number else torch.int64)
        is_linear = not is_product and keeps_sums(x.dtype, result)
        if not can_travel(result):
            return _along(x, dim, is_linear=is_linear)

        def local(context: LocalContext, x: Any, dim: int, *, factor: str, **kwargs: Any) -> Any:
            scanned = context.default(x, dim, **kwargs)
            if not is_any_split(context, [factor]):
                return scanned
            return split_dims.scan(context, scanned, dim, factor, result, is_product=is_product)

        return split_dims.split_along(x, dim, local, int(is_product), is_linear=is_linear)

    return rule


sharding_rule(aten.cumsum.default)(_scan(is_product=False))
sharding_rule(aten.cumprod.default)(_scan(is_product=True))


@sharding_rule(aten.logcumsumexp.default, aten.argsort.default, aten.argsort.stable, aten.glu.default)
def along(x: torch.Tensor, dim: int = -1, **kwargs: Any) -> Rule:
    return _along(x, dim)


@sharding_rule(aten.cummax.default, aten.cummin.default, aten.sort.default, aten.sort.stable)
def along_with_indices(x: torch.Tensor, dim: int = -1, descending: bool = False, **kwargs: Any) -> Rule:
    return _along(x, dim, results=2)


@sharding_rule(aten.topk.default)
def topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Rule:
    return _along(x, dim, results=2)


@sharding_rule(aten.renorm.default)
def renorm(x: torch.Tensor, p: float, dim: int, maxnorm: float) -> Rule:
    """Return a rule that may split only `dim`, because each slice along `dim` is scaled by its own norm."""
    kept = normal_dim(dim, x.dim())
    dims = with_blocked(named(x.dim()), [position for position in range(x.dim()) if position != kept])
    return Rule(((dims,), (dims,)))


@sharding_rule(aten.glu_backward.default)
def glu_backward(grad: torch.Tensor, x: torch.Tensor, dim: int) -> Rule:
    return _along(x, dim, operands=2, is_linear=True)


@sharding_rule(aten.histc.default)
def histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Rule | None:
    """Return a rule that sums the counts of pieces, or None if the range of the bins depends on the data."""
    if min >= max:
        return None
    dims = named(x.dim())
    return Rule(((dims,), ((BLOCKED,),)), reduce=dict.fromkeys(names(dims), "sum"))
