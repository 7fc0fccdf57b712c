"""`WholeStep`: a training step whose update is part of the program, for `check_plan` and drawn programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.ir.loss_scaling import LossScaling
from autoshard.ir.program import Program
from autoshard.ir.update import Update
from autoshard.runtime.micro_batches import Part, parts_of
from autoshard.runtime.traced_optimizer import describe_update, names_of
from autoshard.tracing import trace

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A training step for `check_plan`: forward, backward, clipping and the update of an optimizer.

    Args:
        make_optimizer: takes the model's parameters, and returns an optimizer whose update is traced. These are SGD,
            Adam, AdamW and Muon of torch.optim.
        max_grad_norm: gradients are clipped to this norm. None, the default: no clipping.
        micro_batches: the number of equal parts into which dim 0 of each input is split; default 1.
        loss_scaling: settings of the loss scale in float16. None: the defaults of `LossScaling`.
    """

    make_optimizer: MakeOptimizer
    max_grad_norm: float | None = None
    micro_batches: int = 1
    loss_scaling: LossScaling | None = None

    def cut(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Part]:
        """Return the positional and keyword arguments of each micro-batch. Tensors are split evenly along dim 0."""
        return list(parts_of(args, kwargs, self.micro_batches).parts)

    def update(self, model: nn.Module, *, scales_loss: bool = False) -> Update:
        """`check_plan` calls this: return the optimizer's update of `model`'s parameters as data for tracing."""
        optimizer = self.make_optimizer(model.parameters())
        names = names_of(model.named_parameters())
        return describe_update(optimizer, names, self.max_grad_norm, scales_loss=scales_loss)


def trace_training(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    whole_step: WholeStep | None,
    dtype: torch.dtype | None = None,
) -> Program:
    """Return the traced program of a call of `model`, or with `whole_step`, of its step's first micro-batch.

    `dtype` is the dtype in which operators compute; None: the model's own dtypes.
    """
    if whole_step is None:
        return trace(model, tuple(args), dict(kwargs), compute_dtype=dtype)
    part, named = whole_step.cut(args, kwargs)[0]
    update = whole_step.update(model, scales_loss=dtype is torch.float16)
    return trace(model, tuple(part), dict(named), compute_dtype=dtype, update=update)
