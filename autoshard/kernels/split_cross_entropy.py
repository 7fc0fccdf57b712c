"""The local parts of cross-entropy over a split vocabulary: `autoshard::split_cross_entropy` and its backward.

Shoeybi et al., "Megatron-LM" (2019), section 3. Between the parts, `autoshard.rules.losses` communicates one number per
row: the greatest logit before the forward, the sum and the target's logit after it. For a rank's classes c, with e if
the target is on another rank, and i if it is ignored:

    forward:   total = sum_c exp(x_c - top),    expected = factor x_target        (0 if e)
    backward:  dx_c  = scale (exp(x_c - lse) - shift) + correction scale [c = target, not e]    (0 if i)
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
    """The sum of exponentials of each row, and the target's logit.

    Args:
        logits: [N, C], the rank's classes, any float dtype.
        top: [N], the greatest logit over all classes; float32, or float64 when the logits are.
        indices: [N] int64, the target among the rank's classes, each in [0, C).
        elsewhere: [N] bool, whether the target is on another rank.
        factor: the factor on the target's logit.

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
    """The gradient of the logits, [N, C] in their dtype.

    Args:
        logits, indices, elsewhere: see `split_cross_entropy_reference`.
        lse: [N], the log-sum-exp over all classes, in the accumulation dtype.
        scale: [N], the gradients of the losses.
        is_ignored: [N] bool, the ignored rows.
        correction: added for the class of the target.
        shift: subtracted from every class.
    """
    classes = torch.arange(logits.shape[1], device=logits.device)
    is_target = (classes == indices.unsqueeze(1)) & ~elsewhere.unsqueeze(1)
    at_target = correction * is_target.to(lse.dtype)
    grad = (torch.exp(logits.to(lse.dtype) - lse.unsqueeze(1)) - shift + at_target) * scale.unsqueeze(1)
    return grad.masked_fill(is_ignored.unsqueeze(1), 0.0).to(logits.dtype)


def fake_forward(logits: Tensor, top: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Empty tensors for the results of the forward."""
    return torch.empty_like(top), torch.empty_like(top)


def fake_backward(logits: Tensor, *_: object) -> Tensor:
    """An empty tensor for the result of the backward."""
    return logits.new_empty(logits.shape)


split_cross_entropy = define("split_cross_entropy", ARGUMENTS, split_cross_entropy_reference, fake_forward)
split_cross_entropy_backward = define(
    "split_cross_entropy_backward", BACKWARD_ARGUMENTS, split_cross_entropy_backward_reference, fake_backward
)
