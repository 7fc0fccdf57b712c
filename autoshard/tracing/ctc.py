"""torch's `ctc_loss` as a call of the semantic operator `autoshard::ctc_loss` during a trace.

The semantic operator takes targets as rows of one length, and returns the loss of each sequence. Other operators then
compute the mean or sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_MEAN, _SUM = 1, 2
_BLOCK = 32
"""Rows of targets are padded to a multiple of this length, so that batches with similar lengths share a program."""

aten = torch.ops.aten


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """Compute torch's `ctc_loss` by the semantic operator.

    log_probs is [T, N, C] or [T, C]; targets is [N, S], or all targets concatenated in one dim.
    """
    if log_probs.dim() == 2:
        loss = _ctc_loss(log_probs[:, None], targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        return loss if reduction else loss.squeeze(0)
    lengths = _lengths(target_lengths, log_probs)
    rows = targets if targets.dim() == 2 else _rows(targets, lengths, target_lengths)
    operands = (log_probs, rows, _lengths(input_lengths, log_probs), lengths)
    _check_sizes(*operands)
    loss = torch.ops.autoshard.ctc_loss(*operands, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == float("inf"), 0.0, loss)
    if reduction == _MEAN:
        return (loss / lengths.clamp_min(1).to(loss.dtype)).mean()
    return loss.sum() if reduction == _SUM else loss


def _lengths(lengths: Tensor | Sequence[int], log_probs: Tensor) -> Tensor:
    """Return lengths as an int64 tensor [N] on the device of `log_probs`."""
    return torch.as_tensor(lengths, dtype=torch.int64, device=log_probs.device).reshape(-1)


def _rows(targets: Tensor, lengths: Tensor, given: Tensor | Sequence[int]) -> Tensor:
    """Return concatenated targets as rows [N, S] of one length S.

    `lengths` [N] has the targets' lengths, and `given` the lengths as the user gave them. If `given` is a list, S is
    its largest number. If `given` is a tensor, S is its largest value, which is read and rounded up to a multiple of
    `_BLOCK`.
    """
    if isinstance(given, Tensor):
        blocks = int(((lengths.max() + _BLOCK - 1) // _BLOCK).item())
        longest = _BLOCK * blocks
    else:
        longest = max(given, default=0)
    starts = lengths.cumsum(0) - lengths
    places = starts[:, None] + torch.arange(longest, device=targets.device)
    return targets[places.clamp_max(max(len(targets) - 1, 0))] if len(targets) else targets.new_zeros(places.shape)


def _check_sizes(log_probs: Tensor, rows: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> None:
    found = (rows.shape[0], input_lengths.shape[0], target_lengths.shape[0])
    if any(size != log_probs.shape[1] for size in found):
        raise ValueError(
            f"ctc_loss got log_probs of {log_probs.shape[1]} sequences (dim 1), but targets, input_lengths and "
            f"target_lengths of {found}"
        )


CTC: dict[OpOverload, Callable[..., Any]] = {aten.ctc_loss.IntList: _ctc_loss, aten.ctc_loss.Tensor: _ctc_loss}
"""Composite operator of torch → the function that replaces it during a trace."""
