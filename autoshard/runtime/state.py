"""What a sharded module's `state_dict` holds besides the model's own: how far its random numbers have come.

It is there for models that draw random numbers, under the name that torch gives to extra state. A plain model's state
has none, and loads all the same.
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
"""Keys of the extra state where the model has some of its own."""


def write_seeds(destination: dict[str, Any], prefix: str, seeds: SeedSequence) -> None:
    """Add where a sequence stands to a state dict that has the model's own state."""
    key = prefix + _EXTRA
    destination[key] = {"model": destination[key], "seeds": seeds.state()} if key in destination else seeds.state()


def extra_state_of(module: nn.Module) -> Any:
    """The extra state that a module writes for itself; None where it writes none."""
    written: dict[str, Any] = {}
    module._save_to_state_dict(written, "", keep_vars=True)
    return written.get(_EXTRA)


def take_seeds(state: dict[str, Any], prefix: str, model: nn.Module) -> torch.Tensor | None:
    """Take out of a state dict what `write_seeds` added; None where it has nothing of it."""
    key = prefix + _EXTRA
    extra = state.get(key)
    if isinstance(extra, dict) and extra.keys() == _BOTH:
        state[key] = extra["model"]
        return extra["seeds"]
    if type(model).set_extra_state is not nn.Module.set_extra_state:
        return None
    extra = state.pop(key, None)
    return extra if isinstance(extra, torch.Tensor) else None  # torch puts a mark there where a rank has none


def lay_out_state(
    state: dict[str, Any],
    prefix: str,
    model: nn.Module,
    lay_out: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Whole values of parameters that are DTensors become DTensors: `lay_out(value, parameter)`."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == parameter.shape:  # torch says what is wrong otherwise
            state[prefix + name] = lay_out(value, parameter)


def may_draw(model: nn.Module) -> bool:
    """Whether something in the model drops values out: a module or a rate with "drop" in its name."""
    return any(
        "drop" in f"{type(module).__name__}.{name}".lower()
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0
    )
