"""Optimizer state in training loops of the user's own, whose optimizer was not passed to `compile`.

Such state may be plain while the parameters are DTensors. Examples are state made before `compile`, which Adagrad makes
when it is built, and state from a plain `load_state_dict`. It is sharded at the optimizer's next step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard.errors import NotAvailableError
from autoshard.runtime.optimizer_state import lay_out_loaded_state
from autoshard.runtime.replaced_parameter import successor_of
from autoshard.runtime.stages.stage_meshes import is_elsewhere


@dataclass(frozen=True, slots=True)
class StateInLoops:
    """A hook before the steps of all optimizers, which checks each state once."""

    known: WeakKeyDictionary[torch.optim.Optimizer, Any] = field(default_factory=WeakKeyDictionary)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Shard the state as the parameters are."""
        if self.known.get(optimizer) is optimizer.state:
            return
        _refuse_fused(optimizer)
        lay_out_loaded_state(optimizer, _lay_out)
        self.known[optimizer] = optimizer.state


def check_states_again() -> None:
    """Check all states at their next step, because parameters became DTensors while their state is plain."""
    _hook().known.clear()


@cache
def _hook() -> StateInLoops:
    hook = StateInLoops()
    register_optimizer_step_pre_hook(hook)
    return hook


def _refuse_fused(optimizer: torch.optim.Optimizer) -> None:
    """Raise `NotAvailableError` for Adagrad's fused kernel, which torch does not run on DTensors."""
    if isinstance(optimizer, torch.optim.Adagrad):
        for group in optimizer.param_groups:
            if group.get("fused") and any(isinstance(successor_of(item), DTensor) for item in group["params"]):
                raise NotAvailableError(
                    "optimizer=Adagrad has fused=True, a kernel that torch does not run on DTensors, and with "
                    "processes parameters are DTensors. Leave fused= out."
                )


def _lay_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shard a whole tensor, equal on all ranks, as the DTensor `like` is."""
    assert isinstance(like, DTensor), "only state of DTensors is sharded"
    if is_elsewhere(like):
        return value
    laid_out = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return laid_out.clone()  # in memory of its own
