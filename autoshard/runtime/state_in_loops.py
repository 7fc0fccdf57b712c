"""Shard the state of an optimizer that the user steps in their own training loop, by a hook before each step.

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
    """A hook that torch calls before each step of any optimizer. It shards each optimizer's state once.

    `known` maps an optimizer to the object `optimizer.state` whose tensors were sharded.
    """

    known: WeakKeyDictionary[torch.optim.Optimizer, Any] = field(default_factory=WeakKeyDictionary)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Shard the optimizer's state like its parameters, unless this was done.

        Raises:
            NotAvailableError: the optimizer is a fused Adagrad on DTensors.
        """
        if self.known.get(optimizer) is optimizer.state:
            return
        _refuse_fused(optimizer)
        lay_out_loaded_state(optimizer, _lay_out)
        self.known[optimizer] = optimizer.state


def check_states_again() -> None:
    """Make the hook shard the state of all optimizers again at their next step, as parameters have become DTensors."""
    _hook().known.clear()


@cache
def _hook() -> StateInLoops:
    hook = StateInLoops()
    register_optimizer_step_pre_hook(hook)
    return hook


def _refuse_fused(optimizer: torch.optim.Optimizer) -> None:
    """Raise `NotAvailableError` for Adagrad with `fused=True` on DTensors, because torch has no such kernel."""
    if isinstance(optimizer, torch.optim.Adagrad):
        for group in optimizer.param_groups:
            if group.get("fused") and any(isinstance(successor_of(item), DTensor) for item in group["params"]):
                raise NotAvailableError(
                    "optimizer=Adagrad has fused=True, a kernel that torch does not run on DTensors, and with "
                    "processes parameters are DTensors. Leave fused= out."
                )


def _lay_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `value`, which every rank has whole, sharded like the DTensor `like`.

    If only other ranks hold shards of `like`, return `value` itself.
    """
    assert isinstance(like, DTensor), "only state of DTensors is sharded"
    if is_elsewhere(like):
        return value
    laid_out = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return laid_out.clone()  # in memory of its own
