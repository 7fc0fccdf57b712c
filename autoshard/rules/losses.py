"""Rules of losses. Rows may be split. Classes of cross-entropy may be split too, and the rewrite then communicates."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import autoshard.kernels  # noqa: F401  (defines the operators)
from autoshard.ir.spec import Reduction
from autoshard.rules.dims import elementwise, named, names, tensors
from autoshard.rules.indexing import local_indices
from autoshard.rules.local import LocalContext, whole_to_piece
from autoshard.rules.notation import OperandCondition, Rule
from autoshard.rules.registry import sharding_rule

aten = torch.ops.aten
autoshard_ops = torch.ops.autoshard

_NONE, _MEAN, _SUM = 0, 1, 2
"""ATen's numbers for the reductions of a loss."""


@sharding_rule(autoshard_ops.cross_entropy.default)
def cross_entropy(logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float) -> Rule:
    dtype = _accumulation_dtype(logits)
    even = ("c",) if label_smoothing else ()  # smoothing sums logits, and padding is -inf

    def local(context: LocalContext, logits: Any, target: Any, ignore_index: int, label_smoothing: float) -> Any:
        if not context.is_split("c"):
            return context.default(logits, target, ignore_index, label_smoothing)
        return _split_cross_entropy(context, logits, target, ignore_index, label_smoothing, dtype)

    return Rule("n c, n -> n, n", whole={"c": (0, 1)}, local=local, padding={"c": Reduction.MAX}, even=even)


def _split_cross_entropy(
    context: LocalContext, logits: Any, target: Any, ignore_index: int, smoothing: float, dtype: torch.dtype
) -> tuple[Any, Any]:
    """Emit loss and log-sum-exp of each row, with classes split over ranks, as in Megatron-LM (2019), section 3.

    1. All-reduce the greatest logit of each row. An infinite greatest logit becomes 0.
    2. All-reduce the sum of exponentials, and the logit of the target, which one rank has.
    3. loss = lse - (1 - smoothing) x_target - smoothing mean(x), and 0 for ignored targets.
    """
    call = context.call
    indices, elsewhere = local_indices(context, target, "c")
    greatest = call(aten._to_copy.default, call(aten.amax.default, logits, [1]), dtype=dtype)  # [n]
    top = context.all_reduce(greatest, "max", "c")
    top = call(aten.masked_fill.Scalar, top, call(aten.isinf.default, top), 0)
    parts = call(autoshard_ops.split_cross_entropy.default, logits, top, indices, elsewhere, 1 - smoothing)
    total, expected = (call(operator.getitem, parts, index) for index in range(2))
    lse = call(aten.add.Tensor, call(aten.log.default, context.all_reduce(total, "sum", "c")), top)
    if smoothing:
        logits_sum = call(aten.sum.dim_IntList, call(aten._to_copy.default, logits, dtype=dtype), [1])
        mean = call(aten.mul.Scalar, logits_sum, smoothing / context.global_size("c"))
        expected = call(aten.add.Tensor, expected, mean)
    loss = call(aten.sub.Tensor, lse, context.all_reduce(expected, "sum", "c"))
    is_ignored = call(aten.eq.Scalar, target, ignore_index)
    return call(aten.masked_fill.Scalar, loss, is_ignored, 0), lse


@sharding_rule(autoshard_ops.ctc_loss.default)
def ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, *_: Any) -> str:
    """Return a rule that may split only the batch.

    Times and classes stay whole, because alignments run through them.
    """
    return "_ n _, n _, n, n -> n, n _ _"


@sharding_rule(autoshard_ops.ctc_loss_backward.default)
def ctc_loss_backward(*_: Any) -> str:
    return "n, _ n _, n _, n, n, n, n _ _ -> _ n _"


@sharding_rule(autoshard_ops.cross_entropy_backward.default)
def cross_entropy_backward(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, *_: Any
) -> Rule:
    local = _local_cross_entropy_backward(lse.dtype)
    beside = {1: OperandCondition.ANYTHING, 3: OperandCondition.ANYTHING}  # the gradient is scaled by a probability
    return Rule("n, n c, n, n -> n c", linear=[(0,)], beside=beside, local=local, padding={})


def _local_cross_entropy_backward(accumulation: torch.dtype) -> Any:
    def local(
        context: LocalContext,
        grad: Any,
        logits: Any,
        target: Any,
        lse: Any,
        ignore_index: int,
        smoothing: float,
    ) -> Any:
        """Emit the gradient of the rank's logits, 0 for ignored targets.

        For the logits x of C classes, it is grad (exp(x - lse) - (1 - smoothing) [c = target] - smoothing / C).
        """
        call = context.call
        if not context.is_split("c"):
            return context.default(grad, logits, target, lse, ignore_index, smoothing)
        is_ignored = call(aten.eq.Scalar, target, ignore_index)
        scale = call(aten._to_copy.default, call(aten.masked_fill.Scalar, grad, is_ignored, 0), dtype=accumulation)
        indices, elsewhere = local_indices(context, target, "c")
        shift = smoothing / context.global_size("c")
        rest = (scale, indices, elsewhere, is_ignored, smoothing - 1, shift)
        return call(autoshard_ops.split_cross_entropy_backward.default, logits, lse, *rest)

    return local


def _accumulation_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ATen's losses.


@sharding_rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> Rule | None:
    """Return a rule that may split rows, or None for a single row.

    For a mean, the rewrite all-reduces the sum of losses and the total weight.
    """
    if x.dim() == 1:
        return None
    rows = named(x.dim() - 1, "r")
    operands = ((rows[0], ("c",), *rows[1:]), rows, *(((("c",),),) if weight is not None else ()))
    if reduction == _NONE:
        whole, padding = dict.fromkeys(names(rows), (1,)), dict.fromkeys(names(rows))
        return Rule((operands, (rows, ())), blocked=("c",), whole=whole, padding=padding)
    if reduction == _SUM:
        return Rule((operands, ((), ())), blocked=("c",), reduce=dict.fromkeys(names(rows), "sum"))
    whole = dict.fromkeys(names(rows), (0, 1))
    return Rule((operands, ((), ())), blocked=("c",), whole=whole, local=_local_nll_mean)


def _local_nll_mean(
    context: LocalContext, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> tuple[Any, Any]:
    """Emit mean loss and total weight over all ranks.

    Ranks all-reduce the sum of losses and the total weight, then divide.
    """
    summed = context.default(x, target, weight, _SUM, ignore_index)
    loss, total = summed[0], summed[1]
    for factor in (f"r{dim}" for dim in range(3)):
        loss, total = context.all_reduce(loss, "sum", factor), context.all_reduce(total, "sum", factor)
    return context.call(aten.div.Tensor, loss, total), total


@sharding_rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, *_: Any
) -> Rule | None:
    """Return a rule that needs no communication, because the total weight is an operand. Return None for one row."""
    if x.dim() == 1:
        return None
    rows = named(x.dim() - 1, "r")
    x_dims = (rows[0], ("c",), *rows[1:])
    grad_dims = rows if reduction == _NONE else ()
    operands = (grad_dims, x_dims, rows, *(((("c",),),) if weight is not None else ()), ())
    linear = [(0,), *([(3,)] if weight is not None else [])]
    beside = {
        1: OperandCondition.ANYTHING,
        len(operands) - 1: OperandCondition.NEVER if reduction == _MEAN else OperandCondition.ANYTHING,
    }
    return Rule((operands, (x_dims,)), blocked=("c",), linear=linear, beside=beside)


@sharding_rule(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
def distance_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = _MEAN, *_: Any) -> Rule:
    return _pointwise_loss([x, target], reduction, of_zeros=0)


@sharding_rule(aten.soft_margin_loss.default)
def soft_margin_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = _MEAN) -> Rule:
    return _pointwise_loss([x, target], reduction)


@sharding_rule(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = _MEAN
) -> Rule:
    return _pointwise_loss(tensors(x, target, weight), reduction, of_zeros=0)


@sharding_rule(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    pos_weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
) -> Rule:
    return _pointwise_loss(tensors(x, target, weight, pos_weight), reduction)


def _pointwise_loss(operands: Sequence[torch.Tensor], reduction: int, *, of_zeros: int | None = None) -> Rule:
    """Return the rule of a pointwise loss of the operand, the target, and any weights.

    `of_zeros` is the loss of an element whose operand and target are zero. If it is 0, zero padding adds nothing to a
    sum, and dims of both operands may be split unevenly. A broadcast operand has no padding to fill.
    """
    sides, (dims,) = elementwise([operand.shape for operand in operands])
    both = set(names(sides[0])) & set(names(sides[1]))
    padding = dict.fromkeys(both, 0) if of_zeros == 0 else None
    if reduction == _NONE:
        return Rule((sides, (dims,)), padding=padding)
    local = _local_mean if reduction == _MEAN else None
    reduce = dict.fromkeys(names(dims), "sum")
    return Rule((sides, ((),)), reduce=reduce, local=local, padding=padding)


@sharding_rule(
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default,
)
def pointwise_loss_backward(grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, *_: Any) -> Rule:
    return _pointwise_loss_backward([grad, x, target], reduction)


@sharding_rule(aten.mse_loss_backward.default)
def mse_loss_backward(grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int) -> Rule:
    """Return the rule of 2 grad (x - target), which is linear in `grad`, and in `x` and `target` together."""
    rule = _pointwise_loss_backward([grad, x, target], reduction)
    return replace(rule, linear=[(0,), (1, 2)])


@sharding_rule(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
) -> Rule:
    return _pointwise_loss_backward(tensors(grad, x, target, weight), reduction)


def _pointwise_loss_backward(operands: Sequence[torch.Tensor], reduction: int) -> Rule:
    sides = elementwise([operand.shape for operand in operands])
    return Rule(sides, linear=[(0,)], local=_local_mean if reduction == _MEAN else None, padding={})


def _local_mean(context: LocalContext, *args: Any, **kwargs: Any) -> Any:
    """Emit the operator on the piece, scaled by the piece's share of all elements, so that ranks' results add up."""
    return context.call(aten.div.Scalar, context.default(*args, **kwargs), whole_to_piece(context, context.factors))
