"""Functions for torch optimizers of a sharded module: for their parameters, their state and their options."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import TraceError
from autoshard.runtime.loss_scale import LossScale
from autoshard.runtime.replaced_parameter import ReplacedParameter, successor_of


def rebind_optimizer(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Make an optimizer from before `compile` update the DTensors that replaced its parameters.

    Groups, their options and attached schedulers stay. `parameters` are the present parameters of the model.

    Raises:
        TraceError: the optimizer has parameters of another model, has already taken steps, or has made state without
            values for parameters on the meta device.
    """
    _check_has_values(optimizer)
    follow_replaced(optimizer)
    check_parameters(optimizer, {id(parameter) for parameter in parameters})
    replaced = [parameter for parameter in optimizer.state if isinstance(parameter, ReplacedParameter)]
    if any(_has_stepped(optimizer.state[parameter]) for parameter in replaced):
        raise TraceError(
            f"optimizer={type(optimizer).__name__} has already taken steps on the unsharded model. Compile with "
            "a fresh optimizer, then load its state with load_state_dict."
        )
    for parameter in replaced:
        optimizer.state[successor_of(parameter)] = optimizer.state.pop(parameter)


def follow_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Replace, in an optimizer's groups, each parameter from before `compile` by the DTensor that replaced it."""
    for group in optimizer.param_groups:
        group["params"] = [successor_of(item) for item in group["params"]]


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether the optimizer has taken a step on the parameter with this state.

    True if the state has no count of steps.
    """
    return float(state.get("step", 1)) > 0


def _check_has_values(optimizer: torch.optim.Optimizer) -> None:
    tensors = (item for state in optimizer.state.values() for item in state.values() if isinstance(item, torch.Tensor))
    if any(tensor.is_meta for tensor in tensors):
        raise TraceError(
            f"optimizer={type(optimizer).__name__} makes its state when it is built, so over parameters on the meta "
            "device its state has no values. Use an optimizer that makes its state at its first step (AdamW, SGD, "
            "RMSprop), or build the model in memory."
        )


def check_parameters(optimizer: torch.optim.Optimizer, known: Container[int]) -> None:
    """Raise `TraceError` if an optimizer has a parameter whose `id` is not in `known`."""
    for number, group in enumerate(optimizer.param_groups):
        strangers = [item for item in group["params"] if id(item) not in known]
        if strangers:
            raise TraceError(
                f"optimizer={type(optimizer).__name__} holds {len(strangers)} parameters in group {number} that "
                f"are not the model's, the first of shape={tuple(strangers[0].shape)}. Make it with "
                "model.parameters()."
            )


def lay_out_loaded_state(
    optimizer: torch.optim.Optimizer, lay_out: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Shard each whole tensor in an optimizer's state like its parameter.

    A plain `load_state_dict` leaves state tensors whole. `lay_out(tensor, parameter)` returns the whole `tensor`,
    sharded as `parameter` is.
    """
    for held, state in optimizer.state.items():
        parameter = successor_of(held)
        if isinstance(parameter, DTensor):
            for name, value in state.items():
                if type(value) is torch.Tensor and value.dim() and value.shape == parameter.shape:
                    state[name] = lay_out(value, parameter)


def named_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return a torch optimizer by a name such as "adamw", with default options.

    The optimizer updates `parameters`, or one placeholder parameter if there are none. "sgd_momentum" is SGD with a
    momentum of 0.9.

    Raises:
        TraceError: torch.optim has no optimizer of this name, or it refuses these parameters.
    """
    known: dict[str, Callable[..., torch.optim.Optimizer]] = {
        key.lower(): kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and key != "Optimizer"
    }
    known["sgd_momentum"] = partial(torch.optim.SGD, momentum=0.9)
    if name.lower() not in known:
        raise TraceError(f"optimizer={name!r} is not in torch.optim; use one of {', '.join(sorted(known))}.")
    try:
        return known[name.lower()](list(parameters) or [nn.Parameter(torch.zeros(_SIDE, _SIDE))])
    except ValueError as error:
        raise TraceError(
            f"optimizer={name!r} cannot be made over all of the model's parameters: {error}. Make it over the "
            "parameters that it takes, and pass it."
        ) from error


_SIDE = 64


class HyperparameterText:
    """A function that returns an optimizer's present hyperparameters as text. Ranks compare it, and messages show it.

    The text has the options of each group, `max_grad_norm` and the number of steps. If set, it also has `on_nonfinite`
    and the scale of the loss.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None,
        on_nonfinite: str | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self._loss_scale = loss_scale
        self._checks = "" if on_nonfinite is None else f", on_nonfinite={on_nonfinite}"
        self._optimizer = optimizer

    def __call__(self) -> str:
        groups = (
            ", ".join(f"{name}={_as_text(group[name])}" for name in sorted(group.keys() - {"params"}))
            for group in self._optimizer.param_groups
        )
        text = f"{type(self._optimizer).__name__}({'; '.join(groups)})"
        scale = "" if self._loss_scale is None else f", loss_scale={self._loss_scale.value:g}"
        return f"{text}, max_grad_norm={self.max_grad_norm}{self._checks}{scale}, after {self._steps()} steps"

    def _steps(self) -> str:
        state = self._optimizer.state
        parameters = (item for group in self._optimizer.param_groups for item in group["params"])
        first = next((item for item in parameters if item in state), None)
        return _as_text({} if first is None else state[first].get("step", 0))


def _as_text(value: object) -> str:
    """Return an option as text. A tensor on an accelerator is not read, because that would wait for the device."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    return str(value.item()) if value.device.type == "cpu" and value.numel() == 1 else "a tensor"
