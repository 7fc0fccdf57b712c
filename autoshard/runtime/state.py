"""Save and load the place in a module's sequence of seeds, as extra state in its `state_dict`.

Models that may draw random numbers have the place under torch's name for extra state ("_extra_state"). The state dict
of a plain model lacks it, and can be loaded too.
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
"""The keys of the extra state of a model with extra state of its own: the model's, and the place in the seeds."""


def write_seeds(destination: dict[str, Any], prefix: str, seeds: SeedSequence) -> None:
    """Add the place in a sequence of seeds to the state dict `destination`, under `prefix` and "_extra_state"."""
    key = prefix + _EXTRA
    destination[key] = {"model": destination[key], "seeds": seeds.state()} if key in destination else seeds.state()


def extra_state_of(module: nn.Module) -> Any:
    """Return the extra state that a module saves in its `state_dict`; None if it saves none."""
    written: dict[str, Any] = {}
    module._save_to_state_dict(written, "", keep_vars=True)
    return written.get(_EXTRA)


def take_seeds(state: dict[str, Any], prefix: str, model: nn.Module) -> torch.Tensor | None:
    """Remove the place that `write_seeds` added to a state dict; return it as int64[2], or None if there is none."""
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
    """Replace each whole tensor in a state dict whose parameter is a DTensor by `lay_out(tensor, parameter)`."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == parameter.shape:  # torch reports another shape as an error
            state[prefix + name] = lay_out(value, parameter)


def may_draw(model: nn.Module) -> bool:
    """Whether a model may draw random numbers: a module has a float attribute above 0, such as `Dropout.p`.

    Only attributes count that have "drop" in their own name, or in the name of the module's class.
    """
    return any(
        "drop" in f"{type(module).__name__}.{name}".lower()
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0
    )
