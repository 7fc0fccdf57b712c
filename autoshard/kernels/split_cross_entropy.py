"""`autoshard::split_cross_entropy` and its backward: a rank's share of cross-entropy over a split vocabulary.

Shoeybi et al., "Megatron-LM" (2019), section 3. Each rank has the logits of some of the classes. The communication is
in `autoshard.rules.losses`. Before the forward, ranks reduce the greatest logit of each row. After it, they reduce two
numbers for each row: the sum of exponentials, and the logit of the target. For the classes c of a rank:

    forward:   total = sum_c exp(x_c - top)
               expected = factor x_target                              (0 if the target is on another rank)
    backward:  dx_c = scale (exp(x_c - lse) - shift)                   (0 if the row is ignored)
               and for c = target on this rank also + correction scale
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoshard.kernels.library import define

ARGUMENTS = (
    "(Tensor logits, Tensor top, Tensor indices, Tensor elsewhere, float factor) -> (Tensor total, Tensor expected)"
)
BACKWARD_ARGUMENTS = (
    "(Tensor logits, Tensor lse, Tensor scale, Tensor indices, Tensor elsewhere, Tensor is_ignored, "
    "float correction, float shift) -> Tensor"
)


def split_cross_entropy_reference(
    logits: Tensor, top: Tensor, indices: Tensor, elsewhere: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """Return the sum of exponentials of each row over the rank's classes, and the target's logit times `factor`.

    Args:
        logits: [N, C], the logits of the rank's classes, any float dtype.
        top: [N], the greatest logit over the classes of all ranks, in float32, or in float64 for float64 logits.
        indices: [N] int64, the target's number among the rank's classes, in [0, C). Any valid number if `elsewhere`.
        elsewhere: [N] bool, whether the target is on another rank.
        factor: multiplies the target's logit.

    Returns:
        total [N] and expected [N], in the dtype of `top`.
    """
    x = logits.to(top.dtype)
    picked = x.gather(1, indices.unsqueeze(1)).squeeze(1)
    return torch.exp(x - top.unsqueeze(1)).sum(1), picked.masked_fill(elsewhere, 0.0) * factor


def split_cross_entropy_backward_reference(
    logits: Tensor,
    lse: Tensor,
    scale: Tensor,
    indices: Tensor,
    elsewhere: Tensor,
    is_ignored: Tensor,
    correction: float,
    shift: float,
) -> Tensor:
    """Return the gradient of the rank's logits, [N, C] in their dtype.

    Args:
        logits, indices, elsewhere: arguments of `split_cross_entropy_reference`.
        lse: [N], the log-sum-exp over the classes of all ranks, in the accumulation dtype.
        scale: [N], the gradients of the losses.
        is_ignored: [N] bool, whether the row's gradient is zero.
        correction: added to the probability of the target's class before scaling.
        shift: subtracted from the probability of every class before scaling.
    """
    classes = torch.arange(logits.shape[1], device=logits.device)
    is_target = (classes == indices.unsqueeze(1)) & ~elsewhere.unsqueeze(1)
    at_target = correction * is_target.to(lse.dtype)
    grad = (torch.exp(logits.to(lse.dtype) - lse.unsqueeze(1)) - shift + at_target) * scale.unsqueeze(1)
    return grad.masked_fill(is_ignored.unsqueeze(1), 0.0).to(logits.dtype)


def fake_forward(logits: Tensor, top: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Return empty results of `split_cross_entropy`: total [N] and expected [N]."""
    return torch.empty_like(top), torch.empty_like(top)


def fake_backward(logits: Tensor, *_: object) -> Tensor:
    """Return an empty gradient of the rank's logits [N, C]."""
    return logits.new_empty(logits.shape)


split_cross_entropy = define("split_cross_entropy", ARGUMENTS, split_cross_entropy_reference, fake_forward)
split_cross_entropy_backward = define(
    "split_cross_entropy_backward", BACKWARD_ARGUMENTS, split_cross_entropy_backward_reference, fake_backward
)
