"""`autoshard::ctc_loss` and its backward: the loss of each sequence by connectionist temporal classification.

The loss is the negative log of a target's probability, summed over all alignments with blanks (Graves et al.,
"Connectionist Temporal Classification", ICML 2006). Unlike in torch, the table `log_alpha` is as wide as for the
longest possible target, so that its size follows from the operands' shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoshard.kernels.library import define, differentiate, refuse_derivative

aten = torch.ops.aten


def ctc_loss_reference(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int
) -> tuple[Tensor, Tensor]:
    """Return the loss [N] of each sequence, and the logs of the forward variables, alpha in the paper, [N, T, 2 S + 1].

    N is the number of sequences, T of time steps, C of classes, and S of places for labels. The loss is infinite if no
    alignment gives the target. log_alpha is -inf beyond a sequence's lengths.

    Args:
        log_probs: [T, N, C], float32 or float64. The results have the same dtype.
        targets: [N, S] integers in [0, C), none of them `blank`. Values beyond a target's length are ignored.
        input_lengths: [N] integers, each at most T.
        target_lengths: [N] integers, each at most S.
        blank: the class that stands for no label.
    """
    loss, log_alpha = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank)
    width = 2 * targets.shape[1] + 1
    log_alpha = F.pad(log_alpha, (0, width - log_alpha.shape[2]))
    device = log_probs.device  # lengths and targets may be on another device, as in torch
    states = torch.arange(width, device=device) <= 2 * target_lengths.to(device)[:, None, None]
    times = torch.arange(len(log_probs), device=device)[:, None] < input_lengths.to(device)[:, None, None]
    return loss, torch.where(states & times, log_alpha, float("-inf"))  # torch leaves the rest uninitialised


def ctc_loss_backward_reference(
    grad_loss: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    loss: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Return the gradient of the log-probabilities, [T, N, C].

    `grad_loss` is [N]. With `zero_infinity`, a sequence with infinite loss has gradient zero. The other arguments are
    arguments and results of `ctc_loss_reference`.
    """
    lengths = (input_lengths, target_lengths)
    return aten._ctc_loss_backward.Tensor(
        grad_loss, log_probs, targets, *lengths, loss, log_alpha, blank, zero_infinity
    ).contiguous()


def _fake(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    time, batch, _classes = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, 2 * targets.shape[1] + 1)


def _fake_backward(grad_loss: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad_loss: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 6
    grad = ctc_loss_backward(grad_loss, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return grad, None, None, None, None, None


def _implementation(*args: Any) -> tuple[Tensor, Tensor]:
    return ctc_loss_reference(*args[:-1])  # only the backward reads zero_infinity


_OPERANDS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
ctc_loss = define(
    "ctc_loss",
    f"({_OPERANDS}, int blank, bool zero_infinity) -> (Tensor loss, Tensor log_alpha)",
    _implementation,
    _fake,
)
ctc_loss_backward = define(
    "ctc_loss_backward",
    f"(Tensor grad_loss, {_OPERANDS}, Tensor loss, Tensor log_alpha, int blank, bool zero_infinity) -> Tensor",
    ctc_loss_backward_reference,
    _fake_backward,
)
differentiate(ctc_loss, _setup_context, _backward)
refuse_derivative(ctc_loss_backward, "CTC loss")
