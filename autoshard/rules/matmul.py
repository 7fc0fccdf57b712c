"""Rules of matrix products.

A product is linear in each operand, and is a sum over the contracted factor. An addend, such as the bias of `addmm`, is
part of this sum. So it must be a partial sum if the contracted factor is split.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autoshard.rules.dims import all_blocked, are_finite, broadcast_dims, named, names
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Dims, OperandCondition, Rule, parse
from autoshard.rules.registry import sharding_rule

aten = torch.ops.aten

_PRODUCT = ((0,), (1,))
_PRODUCT_WITH_ADDEND = ((0, 1), (0, 2))


def _product(notation: str, *operators: Any) -> None:
    @sharding_rule(*operators)
    def rule(a: torch.Tensor, b: torch.Tensor, *_: Any) -> Rule:
        return Rule(notation, reduce={"k": "sum"}, linear=_PRODUCT)


_product("m k, k n -> m n", aten.mm.default)
_product("b m k, b k n -> b m n", aten.bmm.default)
_product("m k, k -> m", aten.mv.default)
_product("k, k -> scalar", aten.dot.default, aten.vdot.default)
_product("m, n -> m n", aten.outer.default, aten.ger.default)


def _product_with_addend(notation: str, operator: Any) -> None:
    @sharding_rule(operator)
    def rule(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Rule:
        operands, (result,) = parse(notation)
        sides = ((broadcast_dims(bias.shape, result), *operands), (result,))
        reduced = [factor for operand in operands for factor in names(operand) if factor not in names(result)]
        linear = _PRODUCT_WITH_ADDEND if are_finite(beta, alpha) else ()
        return Rule(sides, reduce=dict.fromkeys(reduced, "sum"), added=(0,), linear=linear)


_product_with_addend("m k, k n -> m n", aten.addmm.default)
_product_with_addend("b m k, b k n -> b m n", aten.baddbmm.default)
_product_with_addend("m k, k -> m", aten.addmv.default)
_product_with_addend("m, n -> m n", aten.addr.default)
_product_with_addend("b m k, b k n -> m n", aten.addbmm.default)


@sharding_rule(aten.linear.default)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Rule:
    rows: Dims = named(x.dim() - 1)
    weight_dims: Dims = (("n",), ("k",))[-weight.dim() :]
    result = (*rows, *weight_dims[:-1])
    operands = ((*rows, ("k",)), weight_dims)
    if bias is None:
        return Rule((operands, (result,)), reduce={"k": "sum"}, linear=_PRODUCT)
    sides = ((*operands, broadcast_dims(bias.shape, result)), (result,))
    return Rule(sides, reduce={"k": "sum"}, added=(2,), linear=((0, 2), (1, 2)))


@sharding_rule(aten.matmul.default)
def matmul(a: torch.Tensor, b: torch.Tensor) -> Rule:
    """Return the rule of `matmul` with broadcast batch dims.

    A vector `a` has no factor `m`, and a vector `b` has no factor `n`.
    """
    batch = named(max(a.dim(), b.dim(), 2) - 2, "b")
    rows, columns = (("m",),) * (a.dim() > 1), (("n",),) * (b.dim() > 1)
    left = (*broadcast_dims(a.shape[:-2], batch), *rows, ("k",))
    right = (*broadcast_dims(b.shape[:-2], batch), ("k",), *columns)
    return Rule(((left, right), ((*batch, *rows, *columns),)), reduce={"k": "sum"}, linear=_PRODUCT)


@sharding_rule(aten.linalg_solve_triangular.default)
def solve_triangular(a: torch.Tensor, b: torch.Tensor, *, upper: bool, left: bool = True, **kwargs: Any) -> Rule:
    """Return a rule that may split batches and right-hand sides, the columns of `b` (rows for `left=False`)."""
    batch = named(max(a.dim(), b.dim()) - 2, "b")
    free, _ = ("r",), ("_",)
    result = (*batch, _, free) if left else (*batch, free, _)
    operands = ((*broadcast_dims(a.shape[:-2], batch), _, _), broadcast_dims(b.shape, result))
    return Rule((operands, (result,)), linear=((1,),), beside={0: OperandCondition.NEVER})


@sharding_rule(aten._scaled_mm.default)
def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None, out_dtype: torch.dtype | None = None, *_: Any, **kwargs: Any,
) -> Rule | None:  # fmt: skip
    """Return the rule of `_scaled_mm`, or None if blocks of an operand have scales of their own.

    Each operand has one scale, or one for each row of `a` and column of `b`. Products are summed in a wider dtype. The
    contracted factor may be split unless the result is as narrow as the operands.
    """
    wide = (out_dtype or kwargs.get("out_dtype") or a.dtype).itemsize > a.dtype.itemsize
    scales = (_scale_dims(scale_a, a.shape[0], (("m",), ())), _scale_dims(scale_b, b.shape[1], ((), ("n",))))
    if None in scales:
        return None
    operands: list[Any] = [(("m",), ("k",)), (("k",), ("n",)), *scales]
    operands += [(("n",),)] if bias is not None else []
    operands += [all_blocked(scale_result.dim())] if scale_result is not None else []
    return Rule(
        (operands, ((("m",), ("n",)),)),
        reduce={"k": "sum"},
        added=(4,) if bias is not None else (),
        blocked=() if wide else ("k",),
    )


def _scale_dims(scale: torch.Tensor, rows: int, by_row: Dims) -> Dims | None:
    """Return the dims of an operand's scale: no factors for one number, `by_row` for a number for each row.

    `rows` is the number of the operand's rows (of its columns, for `b`). Return None if blocks of the operand have
    scales of their own.
    """
    if scale.numel() == 1:
        return ((),) * scale.dim()
    return by_row if scale.dim() == 2 and scale.numel() == rows and 1 in scale.shape else None


# Products of groups of rows with a matrix each: mixtures of experts.


_ALIGNED_BYTES = 16
"""Rows of the operands of `aten._grouped_mm` begin at multiples of this number of bytes."""


@sharding_rule(aten._grouped_mm.default)
def grouped_mm(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None = None, *_: Any, **__: Any
) -> Rule | None:
    """Return the rule of a product of groups of rows with one matrix for each expert. Experts cannot be split.

    Rows from offsets[e - 1] to offsets[e] - 1 belong to expert e. Columns are split into multiples of `_ALIGNED_BYTES`.
    """
    if offsets is None or x.dim() != 2 or weight.dim() != 3:
        return None
    count = _ALIGNED_BYTES // x.element_size()
    return replace(
        _GROUPED,
        notation="s (k K), _ (k K) (n N), _ -> s (n N)",
        reduce={"k": "sum", "K": "sum"},
        sizes={name: count if size % count == 0 else 1 for name, size in zip("KN", weight.shape[1:], strict=True)},
        blocked=("K", "N"),
    )


@sharding_rule("transformers.grouped_mm_fallback.default")
def grouped_mm_fallback(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> Rule:
    """Return the rule of a grouped product that, unlike `aten._grouped_mm`, needs no aligned columns."""
    return _GROUPED


@sharding_rule("transformers.grouped_mm_fallback_backward.default")
def grouped_mm_backward(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, grad: torch.Tensor) -> Rule:
    reduce = {"n": "sum", "s": "sum"}
    return Rule(
        "s k, _ k n, _, s n -> s k, _ k n", reduce=reduce, linear=[(3,)], local=_local_grouped, padding={}, even=("s",)
    )


def _local_grouped(context: LocalContext, x: Any, weight: Any, offsets: Any, *rest: Any, **kwargs: Any) -> Any:
    """Emit the product of the rank's rows. If rows are split, offsets are counted from the rank's first row."""
    if context.is_split("s"):
        shifted = context.call(aten.sub.Tensor, offsets, context.offset("s"))
        offsets = context.call(aten.clamp.default, shifted, 0, context.local_size("s"))
    return context.default(x, weight, offsets, *rest, **kwargs)


_GROUPED = Rule(
    "s k, _ k n, _ -> s n", reduce={"k": "sum"}, linear=_PRODUCT, local=_local_grouped, padding={}, even=("s",)
)
"""The rule of a product of groups of rows with one matrix for each group.

The factor s has the rows, and k and n are the dims of a matrix.
"""
