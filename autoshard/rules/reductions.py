"""Rules of operators that reduce, scan or order dims.

A reduced dim is a reduced factor where the reduction is one that addends can have (sum, max, min, product);
where every element of the dim is needed at once (softmax, sort, argmax), it is blocked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autoshard.ir.spec import Reduction
from autoshard.rules.dims import (
    BLOCKED,
    is_additive,
    named,
    names,
    normal_dim,
    normal_dims,
    with_blocked,
    without,
)
from autoshard.rules.local import LocalContext, whole_to_piece
from autoshard.rules.notation import Fill, Rewrite, Rule
from autoshard.rules.registry import sharding_rule

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
    """`fill` in padding changes nothing; None where no number does, or linearity says that it is zero."""
    dims, removed = named(x.dim()), _positions(x, dim)
    reduce = {factor: reduction for position in removed for factor in dims[position]}
    linear = [(0,)] if is_linear and is_additive(x) else ()
    padding = {} if fill is None else dict.fromkeys(reduce, fill)
    sides = ((dims,), (without(dims, removed, keepdim=keepdim),))
    return Rule(sides, reduce=reduce, linear=linear, local=local, padding=padding)


def _positions(x: torch.Tensor, dim: DimList) -> tuple[int, ...]:
    """The reduced dims; a scalar has none, whatever `dim` says."""
    return normal_dims(dim, x.dim()) if x.dim() else ()


def _over_whole(x: torch.Tensor, dim: DimList, keepdim: bool, results: int = 1) -> Rule:
    """A reduction that needs its dims whole."""
    dims = with_blocked(named(x.dim()), removed := _positions(x, dim))
    return Rule(((dims,), (without(dims, removed, keepdim=keepdim),) * results))


# Reductions of addends.


@sharding_rule(aten.sum.dim_IntList)
def sum_dims(x: torch.Tensor, dim: DimList, keepdim: bool = False, **kwargs: Any) -> Rule:
    return _reduction(x, dim, keepdim, "sum", is_linear=True)


@sharding_rule(aten.nansum.default)
def nansum(x: torch.Tensor, dim: DimList = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    return _reduction(x, dim, keepdim, "sum", fill=0)


@sharding_rule(aten.sum.default)
def sum_all(x: torch.Tensor, **kwargs: Any) -> Rule:
    return _reduction(x, None, False, "sum", is_linear=True)


@sharding_rule(aten.mean.dim)
def mean_dims(x: torch.Tensor, dim: DimList, keepdim: bool = False, **kwargs: Any) -> Rule:
    return _mean(x, dim, keepdim)


@sharding_rule(aten.mean.default)
def mean_all(x: torch.Tensor, **kwargs: Any) -> Rule:
    return _mean(x, None, False)


def _mean(x: torch.Tensor, dim: DimList, keepdim: bool) -> Rule:
    """The mean is a sum of the pieces' means, each by its share of the whole; where a piece has padding, zeros."""
    reduced = names(named(x.dim())[position] for position in _positions(x, dim))

    def local(context: LocalContext, *args: Any, **kwargs: Any) -> Any:
        pieces = whole_to_piece(context, reduced)
        mean = context.default(*args, **kwargs)
        return mean if pieces == 1 else context.call(aten.div.Scalar, mean, pieces)

    return _reduction(x, dim, keepdim, "sum", is_linear=True, local=local, fill=0)


@sharding_rule(aten.amax.default)
def amax(x: torch.Tensor, dim: DimList = None, keepdim: bool = False) -> Rule:
    return _reduction(x, dim, keepdim, "max", fill=Reduction.MAX)


@sharding_rule(aten.amin.default)
def amin(x: torch.Tensor, dim: DimList = None, keepdim: bool = False) -> Rule:
    return _reduction(x, dim, keepdim, "min", fill=Reduction.MIN)


@sharding_rule(aten.max.default)
def max_all(x: torch.Tensor) -> Rule:
    return _reduction(x, None, False, "max", fill=Reduction.MAX)


@sharding_rule(aten.min.default)
def min_all(x: torch.Tensor) -> Rule:
    return _reduction(x, None, False, "min", fill=Reduction.MIN)


@sharding_rule(aten.any.default, aten.any.dim, aten.any.dims)
def any_dims(x: torch.Tensor, dim: DimList = None, keepdim: bool = False) -> Rule:
    return _reduction(x, dim, keepdim, "max", fill=0)


@sharding_rule(aten.all.default, aten.all.dim, aten.all.dims)
def all_dims(x: torch.Tensor, dim: DimList = None, keepdim: bool = False) -> Rule:
    return _reduction(x, dim, keepdim, "min", fill=1)


@sharding_rule(aten.prod.default)
def prod_all(x: torch.Tensor, **kwargs: Any) -> Rule:
    return _reduction(x, None, False, "product", fill=1)


@sharding_rule(aten.prod.dim_int)
def prod_dim(x: torch.Tensor, dim: int, keepdim: bool = False, **kwargs: Any) -> Rule:
    return _reduction(x, dim, keepdim, "product", fill=1)


@sharding_rule(aten.count_nonzero.default)
def count_nonzero_all(x: torch.Tensor, dim: int | None = None) -> Rule:
    return _reduction(x, dim, False, "sum", fill=0)


@sharding_rule(aten.count_nonzero.dim_IntList)
def count_nonzero(x: torch.Tensor, dim: Sequence[int]) -> Rule:
    return _reduction(x, dim, False, "sum", fill=0)


@sharding_rule(aten.norm.ScalarOpt_dim)
def norm(x: torch.Tensor, p: float | None, dim: Sequence[int], keepdim: bool = False) -> Rule:
    return vector_norm(x, 2 if p is None else p, dim, keepdim)


@sharding_rule(aten.norm.Scalar)
def norm_all(x: torch.Tensor, p: float = 2) -> Rule:
    return vector_norm(x, p)


@sharding_rule(aten.linalg_vector_norm.default)
def vector_norm(x: torch.Tensor, ord: float = 2, dim: DimList = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Powers add up over pieces; norms of order infinity, one and zero are reductions of the pieces' norms."""
    reduction = {math.inf: "max", -math.inf: "min", 1: "sum", 0: "sum"}.get(ord)
    if reduction is not None:
        return _reduction(x, dim, keepdim, reduction, fill=math.inf if reduction == "min" else 0)
    dims, removed = named(x.dim()), _positions(x, dim)
    reduced = names(dims[position] for position in removed)

    def local(context: LocalContext, *args: Any, **kwargs: Any) -> Any:
        norm = context.default(*args, **kwargs)
        if not any(map(context.is_split, reduced)):
            return norm
        powers = context.call(aten.pow.Tensor_Scalar, norm, ord)
        for factor in reduced:
            powers = context.all_reduce(powers, "sum", factor)
        return context.call(aten.pow.Tensor_Scalar, powers, 1 / ord)

    sides = ((dims,), (without(dims, removed, keepdim=keepdim),))
    padding = dict.fromkeys(reduced, 0 if ord > 0 else math.inf)
    return Rule(sides, whole=dict.fromkeys(reduced, (0,)), local=local, padding=padding)


# Reductions that need their dims whole.


@sharding_rule(aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.mode.default)
def extreme(x: torch.Tensor, dim: int = -1, keepdim: bool = False) -> Rule:
    return _over_whole(x, dim, keepdim, results=2)


@sharding_rule(aten.aminmax.default)
def aminmax(x: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> Rule:
    return _over_whole(x, dim, keepdim, results=2)


@sharding_rule(aten.median.default, aten.nanmedian.default)
def median(x: torch.Tensor) -> Rule:
    return _over_whole(x, None, False)


@sharding_rule(aten.kthvalue.default)
def kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Rule:
    return _over_whole(x, dim, keepdim, results=2)


@sharding_rule(aten.argmax.default, aten.argmin.default)
def argmax(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Rule:
    return _over_whole(x, dim, keepdim)


@sharding_rule(aten.logsumexp.default)
def logsumexp(x: torch.Tensor, dim: DimList, keepdim: bool = False) -> Rule:
    return _over_whole(x, dim, keepdim)


@sharding_rule(aten.var.correction, aten.std.correction)
def variance(x: torch.Tensor, dim: DimList = None, *, keepdim: bool = False, **kwargs: Any) -> Rule:
    return _over_whole(x, dim, keepdim)


@sharding_rule(aten.var_mean.correction, aten.std_mean.correction)
def variance_and_mean(x: torch.Tensor, dim: DimList = None, *, keepdim: bool = False, **kwargs: Any) -> Rule:
    return _over_whole(x, dim, keepdim, results=2)


# Along one dim, keeping it.


def _along(x: torch.Tensor, dim: int, operands: int = 1, results: int = 1, *, is_linear: bool = False) -> Rule:
    dims = with_blocked(named(x.dim()), [normal_dim(dim, x.dim())])
    linear = [(0,)] if is_linear and is_additive(x) else ()
    return Rule(((dims,) * operands, (dims,) * results), linear=linear)


@sharding_rule(aten._softmax.default, aten._log_softmax.default)
def softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Rule:
    return _along(x, dim)


@sharding_rule(aten._safe_softmax.default, aten.softmax.int, aten.log_softmax.int)
def softmax_to(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Rule:
    return _along(x, dim)


@sharding_rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> Rule:
    return _along(grad, dim, operands=2, is_linear=True)


@sharding_rule(aten.cumsum.default)
def cumsum(x: torch.Tensor, dim: int, **kwargs: Any) -> Rule:
    return _along(x, dim, is_linear=True)


@sharding_rule(aten.cumprod.default, aten.logcumsumexp.default)
def scan(x: torch.Tensor, dim: int, **kwargs: Any) -> Rule:
    return _along(x, dim)


@sharding_rule(aten.cummax.default, aten.cummin.default)
def scan_with_indices(x: torch.Tensor, dim: int) -> Rule:
    return _along(x, dim, results=2)


@sharding_rule(aten.sort.default)
def sort(x: torch.Tensor, dim: int = -1, descending: bool = False) -> Rule:
    return _along(x, dim, results=2)


@sharding_rule(aten.sort.stable)
def sort_stable(x: torch.Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Rule:
    return _along(x, dim, results=2)


@sharding_rule(aten.argsort.default)
def argsort(x: torch.Tensor, dim: int = -1, descending: bool = False) -> Rule:
    return _along(x, dim)


@sharding_rule(aten.argsort.stable)
def argsort_stable(x: torch.Tensor, *, stable: bool, dim: int = -1, descending: bool = False) -> Rule:
    return _along(x, dim)


@sharding_rule(aten.topk.default)
def topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Rule:
    return _along(x, dim, results=2)


@sharding_rule(aten.renorm.default)
def renorm(x: torch.Tensor, p: float, dim: int, maxnorm: float) -> Rule:
    """Each slice along `dim` is scaled by its own norm."""
    kept = normal_dim(dim, x.dim())
    dims = with_blocked(named(x.dim()), [position for position in range(x.dim()) if position != kept])
    return Rule(((dims,), (dims,)))


@sharding_rule(aten.glu.default)
def glu(x: torch.Tensor, dim: int = -1) -> Rule:
    return _along(x, dim)


@sharding_rule(aten.glu_backward.default)
def glu_backward(grad: torch.Tensor, x: torch.Tensor, dim: int) -> Rule:
    return _along(x, dim, operands=2, is_linear=True)


@sharding_rule(aten.histc.default)
def histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Rule | None:
    """Counts add up over pieces if the range does not depend on the data."""
    if min >= max:
        return None
    dims = named(x.dim())
    return Rule(((dims,), ((BLOCKED,),)), reduce=dict.fromkeys(names(dims), "sum"))
