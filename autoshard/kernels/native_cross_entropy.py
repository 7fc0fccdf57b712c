"""The native operators of cross-entropy, with whole and with split vocabulary, and their backwards.

They take the arguments of the semantic operators. On a GPU they run Triton kernels (`triton_cross_entropy.py`,
`triton_split_cross_entropy.py`). Elsewhere, and for unsupported dtypes, torch's kernels run on one block of rows after
another. On a CPU, a block fits into a core's cache.

In a block, `aten._log_softmax` gives the loss. The log-sum-exp is the greatest logit of a row minus its greatest
log-probability. For the backward, let q be the target distribution (1 - e at the target, plus e / C everywhere) and g
the gradient of the row's loss. Then `aten._log_softmax_backward_data` of -g q is g (softmax(x) - q), in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from autoshard.kernels.cross_entropy import ARGUMENTS, BACKWARD_ARGUMENTS, fake_backward, fake_loss
from autoshard.kernels.launch import why_not
from autoshard.kernels.library import define
from autoshard.kernels.split_cross_entropy import ARGUMENTS as SPLIT_ARGUMENTS
from autoshard.kernels.split_cross_entropy import BACKWARD_ARGUMENTS as SPLIT_BACKWARD_ARGUMENTS
from autoshard.kernels.split_cross_entropy import fake_backward as fake_split_backward
from autoshard.kernels.split_cross_entropy import fake_forward as fake_split
from autoshard.kernels.split_cross_entropy import split_cross_entropy_reference
from autoshard.kernels.triton_cross_entropy import triton_cross_entropy, triton_cross_entropy_backward
from autoshard.kernels.triton_split_cross_entropy import (
    triton_split_cross_entropy,
    triton_split_cross_entropy_backward,
)

aten = torch.ops.aten

_CPU_BLOCK, _BLOCK = 1 << 18, 1 << 24
"""Logits per block: 1 MiB of float32 on a CPU, 64 MiB elsewhere."""


def native_cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss and the log-sum-exp of each row. The arguments are those of `cross_entropy_reference`."""
    given = (logits, target, ignore_index, label_smoothing)
    if logits.is_cuda and why_not(triton_cross_entropy, *given) is None:
        return triton_cross_entropy(*given)
    is_left_out = target == ignore_index
    safe = target.masked_fill(is_left_out, 0).unsqueeze(1)  # [N, 1]
    loss, lse = fake_loss(logits, target, ignore_index, label_smoothing)
    for x, chosen, its_loss, its_lse in _blocks(logits, safe, loss, lse):
        x = x.to(lse.dtype)
        log_p = aten._log_softmax.default(x, 1, False)
        torch.sub(x.amax(1), log_p.amax(1), out=its_lse)
        torch.neg(_expected(log_p, chosen, label_smoothing), out=its_loss)
    return loss.masked_fill_(is_left_out, 0.0), lse


def _expected(log_p: Tensor, chosen: Tensor, label_smoothing: float) -> Tensor:
    """Return the mean [n] of log-probabilities [n, C] under each row's target distribution; `chosen` is [n, 1]."""
    at_target = log_p.gather(1, chosen).squeeze(1)
    if label_smoothing == 0.0:
        return at_target
    return (1.0 - label_smoothing) * at_target + label_smoothing * log_p.mean(dim=1)


def native_cross_entropy_backward(
    grad_loss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Return the gradient of the logits. The arguments are those of `cross_entropy_backward_reference`."""
    given = (grad_loss, logits, target, lse, ignore_index, label_smoothing)
    if logits.is_cuda and why_not(triton_cross_entropy_backward, *given) is None:
        return triton_cross_entropy_backward(*given)
    is_left_out = target == ignore_index
    safe = target.masked_fill(is_left_out, 0).unsqueeze(1)  # [N, 1]
    grads = grad_loss.to(lse.dtype).masked_fill(is_left_out, 0.0).neg_().unsqueeze(1)  # [N, 1]
    result = logits.new_empty(logits.shape)
    for x, chosen, grad, its_lse, out in _blocks(logits, safe, grads, lse, result):
        log_p = x.to(lse.dtype) - its_lse.unsqueeze(1)
        expected = (grad * (label_smoothing / logits.shape[1])).repeat(1, logits.shape[1])
        expected.scatter_add_(1, chosen, grad * (1.0 - label_smoothing))
        if out.dtype == lse.dtype:
            aten._log_softmax_backward_data.out(expected, log_p, 1, log_p.dtype, out=out)
        else:
            aten.copy_.default(out, aten._log_softmax_backward_data.default(expected, log_p, 1, log_p.dtype))
    return _without_rows(result, is_left_out)


def native_split_cross_entropy(
    logits: Tensor, top: Tensor, indices: Tensor, elsewhere: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """Return each row's sum of exponentials over this rank's classes, and its target's logit times `factor`.

    The arguments are those of `split_cross_entropy_reference`.
    """
    given = (logits, top, indices, elsewhere, factor)
    if logits.is_cuda and why_not(triton_split_cross_entropy, *given) is None:
        return triton_split_cross_entropy(*given)
    total, expected = fake_split(*given)
    for x, its_top, chosen, is_away, its_total, its_expected in _blocks(*given[:4], total, expected):
        found = split_cross_entropy_reference(x, its_top, chosen, is_away, factor)
        its_total.copy_(found[0])
        its_expected.copy_(found[1])
    return total, expected


def native_split_cross_entropy_backward(
    logits: Tensor,
    lse: Tensor,
    scale: Tensor,
    indices: Tensor,
    elsewhere: Tensor,
    is_ignored: Tensor,
    correction: float,
    shift: float,
) -> Tensor:
    """Return the gradient of the rank's logits. The arguments are those of `split_cross_entropy_backward_reference`."""
    given = (logits, lse, scale, indices, elsewhere, is_ignored, correction, shift)
    if logits.is_cuda and why_not(triton_split_cross_entropy_backward, *given) is None:
        return triton_split_cross_entropy_backward(*given)
    at_target = (scale * correction).masked_fill_(elsewhere, 0.0)
    result = logits.new_empty(logits.shape)
    for x, its_lse, its_scale, chosen, its_own, out in _blocks(logits, lse, scale, indices, at_target, result):
        grad = torch.exp_(x.to(lse.dtype) - its_lse.unsqueeze(1))
        grad = (grad.sub_(shift) if shift else grad).mul_(its_scale.unsqueeze(1))
        aten.copy_.default(out, grad.scatter_add_(1, chosen.unsqueeze(1), its_own.unsqueeze(1)))
    return _without_rows(result, is_ignored)


def _without_rows(result: Tensor, is_left_out: Tensor) -> Tensor:
    """Write zeros into the rows of `result` where `is_left_out` is True, and return `result`."""
    if result.is_cpu:
        return result.index_fill_(0, is_left_out.nonzero().squeeze(1), 0.0)
    return result.masked_fill_(is_left_out.unsqueeze(1), 0.0)  # does not wait for the device to count rows


def _blocks(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors' rows block by block, as tuples with the same rows of `logits` and of all `others`."""
    size = max(1, (_CPU_BLOCK if logits.is_cpu else _BLOCK) // max(1, logits.shape[1]))
    return zip(*(item.split(size) for item in (logits, *others)), strict=True)


native = define("native_cross_entropy", ARGUMENTS, native_cross_entropy, fake_loss)
native_backward = define(
    "native_cross_entropy_backward", BACKWARD_ARGUMENTS, native_cross_entropy_backward, fake_backward
)
native_split = define("native_split_cross_entropy", SPLIT_ARGUMENTS, native_split_cross_entropy, fake_split)
native_split_backward = define(
    "native_split_cross_entropy_backward",
    SPLIT_BACKWARD_ARGUMENTS,
    native_split_cross_entropy_backward,
    fake_split_backward,
)
