"""Weights of micro-batches in the loss of a training call, from traces of one micro-batch and of two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.utils import _pytree as pytree

from autoshard.errors import AutoshardError
from autoshard.ir.loss_weights import LossWeights
from autoshard.ir.program import Program
from autoshard.ir.request import Request
from passes.verification.weigh_loss import loss_of, weigh_loss


def weigh_step(program: Program, trace: Callable[[Request], Program], request: Request) -> LossWeights | None:
    """Return the weights of micro-batches in the loss of a training call, or None for a call without gradients or loss.

    Args:
        program: the program of one micro-batch.
        trace: function that traces a request.
        request: the traced call, with the inputs of one micro-batch.
    """
    if not request.grad or request.derivatives or loss_of(program) is None:
        return None
    args, kwargs = pytree.tree_map_only(torch.Tensor, _twice, (request.args, dict(request.kwargs)))
    try:
        pair = trace(replace(request, args=args, kwargs=kwargs, update=None, forward_only=True))
    except AutoshardError as error:
        return LossWeights((), refusal=f"micro_batches: the model cannot be traced for two parts at once. {error}")
    return weigh_loss(program, pair)


def weigh_call(trace: Callable[[Request], Program], request: Request) -> LossWeights | None:
    """Return the weights of `weigh_step`, or None, for a call whose program was compiled without them.

    The call is traced again.

    Args:
        trace: function that traces a request.
        request: the call, with the inputs of one micro-batch.
    """
    return weigh_step(trace(replace(request, update=None, forward_only=True)), trace, request)


def _twice(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x]) if x.dim() else x
