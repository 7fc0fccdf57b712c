"""Shard the state of an optimizer that the user steps in a training loop of their own, by a hook before each step.

The state may be plain tensors while the parameters are DTensors: Adagrad makes state before `compile`, and a plain
`load_state_dict` gives whole tensors.
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
    """A hook that torch calls before each step of any optimizer. It shards the optimizer's state once.

    `known` maps an optimizer to the state dict object (`optimizer.state`) that was sharded.
    """

    known: WeakKeyDictionary[torch.optim.Optimizer, Any] = field(default_factory=WeakKeyDictionary)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Shard the optimizer's state, unless it is known; raise `NotAvailableError` for fused Adagrad on DTensors."""
        if self.known.get(optimizer) is optimizer.state:
            return
        _refuse_fused(optimizer)
        lay_out_loaded_state(optimizer, _lay_out)
        self.known[optimizer] = optimizer.state


def check_states_again() -> None:
    """Let the hook check all optimizers at their next step, because parameters have become DTensors."""
    _hook().known.clear()


@cache
def _hook() -> StateInLoops:
    hook = StateInLoops()
    register_optimizer_step_pre_hook(hook)
    return hook


def _refuse_fused(optimizer: torch.optim.Optimizer) -> None:
    """Raise `NotAvailableError` if an Adagrad has `fused=True`, a kernel that torch does not run on DTensors."""
    if isinstance(optimizer, torch.optim.Adagrad):
        for group in optimizer.param_groups:
            if group.get("fused") and any(isinstance(successor_of(item), DTensor) for item in group["params"]):
                raise NotAvailableError(
                    "optimizer=Adagrad has fused=True, a kernel that torch does not run on DTensors, and with "
                    "processes parameters are DTensors. Leave fused= out."
                )


def _lay_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shard a tensor that every rank has whole as the DTensor `like`, unless only other ranks hold shards."""
    assert isinstance(like, DTensor), "only state of DTensors is sharded"
    if is_elsewhere(like):
        return value
    laid_out = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return laid_out.clone()  # in memory of its own
