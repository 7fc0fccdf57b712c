"""Runs the micro-batches of a step by autograd, for optimizers that take their own step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from autoshard.ir.pipeline_order import StageTask, Work
from autoshard.runtime.micro_batches import Part, share_of
from autoshard.runtime.sharded_module import ShardedModule


@dataclass(slots=True)
class AutogradTasks:
    """Runs forwards by calls of the model, and backwards by autograd; implements `TaskRunner`.

    Args:
        parts: the arguments of each micro-batch.
        weights: the weight of each micro-batch in the loss.
        loss_scale: the factor of all gradients.
        shares: micro-batch → its loss times its weight.
    """

    sharded: ShardedModule
    parts: Sequence[Part]
    weights: Sequence[float]
    loss_scale: float = 1.0
    shares: dict[int, torch.Tensor] = field(default_factory=dict)

    def can_run(self, task: StageTask) -> bool:
        return True

    def run_task(self, task: StageTask) -> None:
        """Run a forward or a backward of a micro-batch. A micro-batch of weight zero has no backward."""
        number = task.micro_batch
        if task.work is Work.FORWARD:
            self.shares[number] = share_of(self.sharded.run_for_loss(*self.parts[number]), self.weights[number])
            return
        if self.shares[number].requires_grad:
            (self.shares[number] * self.loss_scale).backward()
        self.shares[number] = self.shares[number].detach()
