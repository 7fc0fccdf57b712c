"""The extra state in a sharded module's `state_dict`: the place in its sequence of seeds.

It is saved for models that draw random numbers, under torch's name for extra state. The state of a plain model has
none, and can be loaded too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.runtime.seeds import SeedSequence

_EXTRA = "_extra_state"
_BOTH = {"model", "seeds"}
"""Keys of the extra state if the model has extra state of its own."""


def write_seeds(destination: dict[str, Any], prefix: str, seeds: SeedSequence) -> None:
    """Add the place in a sequence of seeds to a state dict that has the model's own state."""
    key = prefix + _EXTRA
    destination[key] = {"model": destination[key], "seeds": seeds.state()} if key in destination else seeds.state()


def extra_state_of(module: nn.Module) -> Any:
    """The extra state that a module saves; None if it saves none."""
    written: dict[str, Any] = {}
    module._save_to_state_dict(written, "", keep_vars=True)
    return written.get(_EXTRA)


def take_seeds(state: dict[str, Any], prefix: str, model: nn.Module) -> torch.Tensor | None:
    """Remove the entry of `write_seeds` from a state dict, and return it; None if there is none."""
    key = prefix + _EXTRA
    extra = state.get(key)
    if isinstance(extra, dict) and extra.keys() == _BOTH:
        state[key] = extra["model"]
        return extra["seeds"]
    if type(model).set_extra_state is not nn.Module.set_extra_state:
        return None
    extra = state.pop(key, None)
    return extra if isinstance(extra, torch.Tensor) else None  # torch puts a mark there if a rank has none


def lay_out_state(
    state: dict[str, Any],
    prefix: str,
    model: nn.Module,
    lay_out: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Replace whole values of DTensor parameters by DTensors, `lay_out(value, parameter)`."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == parameter.shape:  # torch reports another shape as an error
            state[prefix + name] = lay_out(value, parameter)


def may_draw(model: nn.Module) -> bool:
    """Whether the model may drop values: some module, or some rate above 0, has "drop" in its name."""
    return any(
        "drop" in f"{type(module).__name__}.{name}".lower()
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0
    )
