"""Train for some steps on one device or a mesh, for `check_plan`, and collect all values that it compares.

These are outputs or loss, gradients, parameters, buffers, and optimizer state.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.ir.loss import find_loss
from autoshard.ir.loss_scaling import LossScaling
from autoshard.ir.precision import PRECISIONS
from autoshard.runtime.seeds import SeedSequence
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep
from autoshard.testing.rounding import nudge
from autoshard.testing.whole_step import MakeOptimizer, WholeStep
from autoshard.tracing.calling import cast_floats
from autoshard.tracing.precision import run_in_precision
from autoshard.tracing.random_numbers import number_random_operators
from autoshard.tracing.semantic import keep_operators_whole


@dataclass(frozen=True, slots=True)
class Training:
    """The inputs and the optimizer of a training by `check_plan`.

    Args:
        args, kwargs: the inputs of every step.
        steps: the number of steps.
        make_optimizer: maps parameters to an optimizer, which runs outside the program.
        whole_step: the step with its update inside the program; None: use `make_optimizer`.
        draws: whether the model draws random numbers.
        loss_scaling: settings of the scale of the loss of whole steps; None: the loss is not scaled.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    steps: int
    make_optimizer: MakeOptimizer
    whole_step: WholeStep | None
    draws: bool = False
    loss_scaling: LossScaling | None = None


def gradient_descent(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the default optimizer of `check_plan`: SGD with learning rate 0.01."""
    return torch.optim.SGD(parameters, lr=0.01)


def options_of(whole_step: WholeStep, model: nn.Module) -> dict[str, Any]:
    """Return the keyword arguments with which `autoshard.compile` compiles `whole_step` of `model`."""
    return {
        "optimizer": whole_step.make_optimizer(model.parameters()),
        "max_grad_norm": whole_step.max_grad_norm,
        "micro_batches": whole_step.micro_batches,
    }


def train(network: nn.Module, call: Callable[..., Any], training: Training) -> dict[str, torch.Tensor]:
    """Train a network; return the last step's outputs and gradients, and the parameters and buffers after it, by name.

    Names are "output:0", "gradient layers.0.weight", "parameter layers.0.weight" and "buffer mean".

    Args:
        network: holds the parameters.
        call: takes the inputs of a step, runs the network, and returns its outputs.
        training: the steps. For a whole step, the returned values are loss, parameters, buffers and optimizer state.
    """
    if training.whole_step is not None:
        return _train_whole(network, call, training, training.whole_step)
    has_gradients = any(parameter.requires_grad for parameter in network.parameters())
    optimizer = training.make_optimizer(network.parameters()) if has_gradients else None
    seen: dict[str, torch.Tensor] = {}
    for _ in range(training.steps):
        outputs = _tensors(call(*training.args, **training.kwargs))
        seen = {f"output:{index}": output.detach().clone() for index, output in enumerate(outputs)}
        if optimizer is not None:
            optimizer.zero_grad()
            loss = _loss(outputs)
            if loss is not None:
                loss.backward()
            seen |= _gradients(network)
            optimizer.step()
    return seen | _held_by(network)


def _train_whole(
    network: nn.Module, call: Callable[..., Any], training: Training, whole_step: WholeStep
) -> dict[str, torch.Tensor]:
    """Train on one device by whole steps: backward of the whole batch's loss, clipping, the optimizer's update.

    Return the last loss, and parameters, buffers and optimizer state after the last step, by name.
    """
    optimizer = whole_step.make_optimizer(network.parameters())
    scaler = _scaler_of(training.loss_scaling, network)
    seen: dict[str, torch.Tensor] = {}
    for _ in range(training.steps):
        loss = find_loss(call(*training.args, **training.kwargs))
        scaler.scale(loss).backward()
        seen["loss"] = loss.detach()
        scaler.unscale_(optimizer)
        if whole_step.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), whole_step.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen | _held_by(network) | _state_of(optimizer, network)


def _scaler_of(settings: LossScaling | None, network: nn.Module) -> torch.amp.GradScaler:
    """Return torch's gradient scaler with these settings. If `settings` is None, the scaler does nothing."""
    device = next(network.parameters()).device.type
    if settings is None:
        return torch.amp.GradScaler(device, enabled=False)
    return torch.amp.GradScaler(device, **dataclasses.asdict(settings))


def train_compiled(compiled: ShardedModule | TrainStep, training: Training) -> dict[str, torch.Tensor]:
    """Train a compiled model or step on its mesh, and return the same values by name as `train`."""
    if isinstance(compiled, TrainStep):
        return _run_steps(compiled, training)
    return train(compiled, compiled, training)


def _run_steps(step: TrainStep, training: Training) -> dict[str, torch.Tensor]:
    """Train a compiled step; return its last loss, and parameters, buffers and optimizer state after it, by name."""
    seen: dict[str, torch.Tensor] = {}
    for _ in range(training.steps):
        seen["loss"] = step(*training.args, **training.kwargs)
    return seen | _held_by(step.sharded) | _state_of(step.optimizer, step.sharded)


def _held_by(network: nn.Module) -> dict[str, torch.Tensor]:
    seen = {f"parameter {name}": parameter.detach() for name, parameter in network.named_parameters()}
    return seen | {f"buffer {name}": buffer for name, buffer in network.named_buffers()}


def _state_of(optimizer: torch.optim.Optimizer, network: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"state {kind} {name}": torch.as_tensor(value)
        for name, parameter in network.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def train_alone(model: nn.Module, precision: str | None, training: Training) -> dict[str, torch.Tensor]:
    """Train a model on one device, with the casts of `precision` such as "bf16"; return the same values as `train`."""
    narrow = None if precision is None else PRECISIONS[precision]
    return train_as_is(model, model if narrow is None else partial(run_in_precision, model, narrow), training)


def train_as_is(model: nn.Module, call: Callable[..., Any], training: Training) -> dict[str, torch.Tensor]:
    """Train on one device as `train` does, but draw the random numbers that the ranks of a mesh draw."""
    return train(model, _drawing_in_turn(call) if training.draws else call, training)


def _drawing_in_turn(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` with random numbers of a new seed at each call: the seeds that a compiled model would use."""
    seeds = SeedSequence()

    def draw(*args: Any, **kwargs: Any) -> Any:
        with drawing_alike(seeds.draw()):
            return call(*args, **kwargs)

    return draw


@contextlib.contextmanager
def drawing_alike(seed: torch.Tensor) -> Iterator[None]:
    """In this context, a model's random operators draw the same numbers as in its compiled program with this seed."""
    with number_random_operators(seed), keep_operators_whole():
        yield


def train_nearby(model: nn.Module, precision: str | None, training: Training, number: int) -> dict[str, torch.Tensor]:
    """Train a copy of a model as `train_alone` does, with each parameter and input moved by one rounding.

    `number` is the seed that draws up or down for each element.
    """
    eps = 0.0 if precision is None else torch.finfo(PRECISIONS[precision]).eps
    moved = copy.deepcopy(model)
    with torch.no_grad():
        held = dict(moved.named_parameters())
        for name, value in nudge(held, number, eps).items():
            held[name].copy_(value)
    args, kwargs = nudge((training.args, dict(training.kwargs)), number, eps)
    return train_alone(moved, precision, replace(training, args=args, kwargs=kwargs))


def train_precisely(model: nn.Module, dtype: torch.dtype | None, training: Training) -> dict[str, torch.Tensor]:
    """Train a copy of a model on one device, with all floats cast to `dtype` (None: no cast).

    Return the same values as `train`.
    """
    precise, training = in_type(model, dtype, training)
    return train_as_is(precise, precise, training)


def in_type(model: nn.Module, dtype: torch.dtype | None, training: Training) -> tuple[nn.Module, Training]:
    """Return a copy of the model and its training, with parameters, buffers and inputs cast to `dtype`, if given."""
    same = copy.deepcopy(model)
    if dtype is None:
        return same, training
    args, kwargs = cast_floats((training.args, dict(training.kwargs)), dtype)
    return same.to(dtype), replace(training, args=args, kwargs=kwargs)


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the first scalar among the outputs that has a gradient; if there is none, a weighted sum of all outputs.

    The weights of an output's elements differ. The real and the imaginary part of a complex element have two weights.
    Return None if no output has a gradient.
    """
    differentiable = [_in_reals(output) for output in outputs if output.requires_grad]
    for output in differentiable:
        if output.ndim == 0:
            return output
    weighted = [(output * torch.linspace(0.5, 1.5, output.numel()).view_as(output)).sum() for output in differentiable]
    return torch.stack(weighted).sum() if weighted else None


def _in_reals(output: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(output) if output.is_complex() else output


def _gradients(network: nn.Module) -> dict[str, torch.Tensor]:
    parameters = network.named_parameters()
    return {f"gradient {name}": parameter.grad.clone() for name, parameter in parameters if parameter.grad is not None}
