"""`autoshard::cross_entropy` and its backward: the loss of each row of logits, without storing probabilities.

With x = logits[n], t = target[n], e = label_smoothing, C classes (Szegedy et al., "Rethinking the Inception
architecture", CVPR 2016, section 7, for the smoothing):

    lse  = log sum_c exp(x_c)
    loss = lse - (1 - e) x_t - (e / C) sum_c x_c                      (0 where t = ignore_index)
    dx_c = grad_loss (exp(x_c - lse) - (1 - e) [c = t] - e / C)       (0 where t = ignore_index)

The caller sums or averages over rows, and applies class weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoshard.kernels.library import accumulation_dtype, define, differentiate

ARGUMENTS = "(Tensor logits, Tensor target, SymInt ignore_index, float label_smoothing) -> (Tensor loss, Tensor lse)"
BACKWARD_ARGUMENTS = (
    "(Tensor grad_loss, Tensor logits, Tensor target, Tensor lse, SymInt ignore_index, float label_smoothing) -> Tensor"
)


def cross_entropy_reference(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return loss and log-sum-exp of each row.

    Args:
        logits: [N, C], any float dtype.
        target: [N] int64, each in [0, C) or equal to ignore_index.
        ignore_index: the target of rows whose loss is 0.
        label_smoothing: e, the weight of the uniform distribution in the target distribution, in [0, 1].

    Returns:
        loss [N] and lse [N], in float32, or in float64 for float64 logits.
    """
    x = logits.to(accumulation_dtype(logits.dtype))  # [N, C]
    lse = torch.logsumexp(x, dim=1)  # [N]
    is_counted = target != ignore_index
    at_target = x.gather(1, _safe(target, is_counted)).squeeze(1)
    loss = lse - at_target
    if label_smoothing > 0.0:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (lse - x.mean(dim=1))
    return torch.where(is_counted, loss, 0.0), lse


def cross_entropy_composite(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor]:
    """Compute the loss of `cross_entropy_reference` with operators that torch can differentiate.

    The loss is in a tuple.
    """
    is_counted = (target != ignore_index).unsqueeze(1)  # ignored rows may contain infinities
    loss, _ = cross_entropy_reference(torch.where(is_counted, logits, 0.0), target, ignore_index, label_smoothing)
    return (loss,)


def cross_entropy_backward_reference(
    grad_loss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Return the gradient of the logits, [N, C] in their dtype, in one pass without a scatter.

    grad_loss is [N]. The other arguments are arguments and results of `cross_entropy_reference`.
    """
    x = logits.to(lse.dtype)
    is_counted = (target != ignore_index).unsqueeze(1)  # [N, 1]
    classes = torch.arange(x.shape[1], device=x.device)
    expected = (classes == target.unsqueeze(1)).to(x.dtype) * (1.0 - label_smoothing)
    dx = torch.exp(x - lse.unsqueeze(1)) - label_smoothing / x.shape[1] - expected
    dx = dx * grad_loss.to(lse.dtype).unsqueeze(1)
    # An ignored row may contain any values, even infinities.
    return torch.where(is_counted, dx, 0.0).to(logits.dtype).contiguous()


def _safe(target: Tensor, is_counted: Tensor) -> Tensor:
    return torch.where(is_counted, target, 0).unsqueeze(1)


def fake_loss(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Return empty results of `cross_entropy`: loss [N] and lse [N]."""
    rows = (logits.shape[0],)
    dtype = accumulation_dtype(logits.dtype)
    return logits.new_empty(rows, dtype=dtype), logits.new_empty(rows, dtype=dtype)


def fake_backward(
    grad_loss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Return an empty gradient of the logits [N, C]."""
    return logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, *ctx.constants = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, lse)


def _backward(ctx: Any, grad_loss: Tensor | None, grad_lse: None) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return None, None, None, None
    logits, target, lse = ctx.saved_tensors
    grad_logits = cross_entropy_backward(grad_loss, logits, target, lse, *ctx.constants)
    return grad_logits, None, None, None


cross_entropy = define(
    "cross_entropy",
    ARGUMENTS,
    cross_entropy_reference,
    fake_loss,
)
cross_entropy_backward = define(
    "cross_entropy_backward",
    BACKWARD_ARGUMENTS,
    cross_entropy_backward_reference,
    fake_backward,
)
differentiate(cross_entropy, _setup_context, _backward, cross_entropy_composite)
