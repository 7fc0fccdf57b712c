"""A use is a script as a user would write it, run on one device and with `autoshard.compile`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

import autoshard
from tests.end_to_end.training import plain_step

Numbers = Sequence[float]


class Compile(Protocol):
    """The type of `compile` in a script, which takes no mesh."""

    def __call__(self, model: nn.Module, **options: Any) -> Any: ...


@dataclass(frozen=True)
class Use:
    """Lines of a user's script, run with a plain and with a real `compile`.

    Args:
        name: the user's action, in a few words.
        script: builds a model from a fixed seed, passes the model to `compile`, and returns numbers, such as losses.
            The numbers are equal on one device and compiled.
        refused: a pattern of the `AutoshardError` that refuses the use, or None.
        processes: run on two Gloo ranks, not on the simulator.
        tolerance: the largest difference of a number, absolute and relative.
    """

    name: str
    script: Callable[[Compile], Numbers]
    refused: str | None = None
    processes: bool = False
    tolerance: float = 1e-5


def on_both(name: str, script: Callable[[Compile], Numbers], **options: Any) -> tuple[Use, Use]:
    """Return a use on the simulator, and on two ranks."""
    return Use(name, script, **options), Use(f"{name}, on two ranks", script, processes=True, **options)


def train(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor], steps: int = 3) -> list[torch.Tensor]:
    """Return the losses of a loop in plain PyTorch; `loss` calls the model."""
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        found.append(loss())
        found[-1].backward()
        optimizer.step()
    return found


def one_device(model: nn.Module, **options: Any) -> Any:
    """Stand in for `compile` on one device: return the model, or a plain training step if given an optimizer."""
    optimizer = options.get("optimizer")
    return model if optimizer is None else _Step(model, optimizer, options.get("loss_fn"), options.get("max_grad_norm"))


def sharded(model: nn.Module, **options: Any) -> Any:
    """Compile on two ranks that split the batch, which are simulated or those of the process group."""
    return autoshard.compile(model, autoshard.Mesh({"data": 2}), **options)


def numbers(*values: Any) -> list[float]:
    """Return all entries of tensors and numbers in one list; DTensors are gathered."""
    found: list[float] = []
    for value in values:
        tensor = torch.as_tensor(value).detach()
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found += copy.deepcopy(whole).double().flatten().tolist()
    return found


class _Step:
    """A training step on one device, with loss function and clipping."""

    def __init__(self, model: nn.Module, optimizer: Any, loss_fn: Any, max_grad_norm: float | None) -> None:
        self.model, self.optimizer, self.loss_fn, self.max_grad_norm = model, optimizer, loss_fn, max_grad_norm

    def __call__(self, *inputs: Any, **named: Any) -> torch.Tensor:
        return plain_step(self.model, self.optimizer, *inputs, loss_fn=self.loss_fn, limit=self.max_grad_norm, **named)
