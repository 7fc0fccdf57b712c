"""Trial steps of an optimizer on small parameters: how much state it keeps, and whether its update is elementwise.

The trials use a shallow copy of the optimizer, with the options of one of its groups and with fresh state. They make
one assumption: the optimizer treats large parameters as it treats parameters of a few thousand elements.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.errors import NotAvailableError
from autoshard.joined_optimizer import parts_of_optimizer

_SIDE = 64
_STEPS = 3
_LR = 0.01
_TOLERANCE = 1e-3
"""Greatest difference of two updates that count as equal, relative to the largest element."""

_ON_SHARDS = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.ASGD),
)
"""Torch's optimizers with an elementwise update, which torch runs on DTensors with any sharding."""


def state_bytes_per_parameter_byte(optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of state that an optimizer keeps per byte of a float32 parameter: 2.0 for AdamW, 0.0 for SGD.

    If the optimizer has no state yet, a copy takes one step on a small parameter, with the first group's options. Each
    part of a `JoinedOptimizer` takes such a step, and the largest result counts.

    Raises:
        NotAvailableError: the trial step fails.
    """
    if optimizer.state:
        elements = sum(parameter.numel() for parameter in optimizer.state)
        return sum(map(_held_bytes, optimizer.state.values())) / (max(1, elements) * torch.float32.itemsize)
    value = torch.zeros(_SIDE, _SIDE)
    states = [_tried(item, item.param_groups[0], value, [value])[1] for item in parts_of_optimizer(optimizer)]
    return max(map(_held_bytes, states)) / value.nbytes


def parameters_needed_whole(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that must be whole on each rank that updates them.

    Their update is not elementwise, or uses operators that torch does not shard (Rprop). Torch's own classes are known.
    An optimizer of another class takes trial steps, with the options of each group. The group's update is elementwise
    if half of a small parameter moves in these steps as this half alone does. An optimizer of such a class that already
    has state is not tried, and needs all its parameters whole.

    Raises:
        NotAvailableError: the trial steps fail, or depend on random numbers.
    """
    found: list[torch.Tensor] = []
    for item in parts_of_optimizer(optimizer):
        if type(item) not in _ON_SHARDS:
            is_torchs = type(item) in vars(torch.optim).values()
            groups = [group for group in item.param_groups if is_torchs or not _is_elementwise(item, group)]
            found += [parameter for group in groups for parameter in group["params"]]
    return found


def _is_elementwise(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> bool:
    if optimizer.state:
        return False  # state from before the first step is not that of a small parameter
    ranks = {max(1, parameter.dim()) for parameter in options["params"]}
    return all(_moves_parts_alone(optimizer, options, rank) for rank in sorted(ranks))


def _moves_parts_alone(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], rank: int) -> bool:
    """Whether trial steps update half of a parameter as they update a parameter that is this half.

    The parameter has `rank` dims. It is halved along each of its first two dims in turn.

    Raises:
        NotAvailableError: the optimizer draws random numbers."""
    shape = (_SIDE,) * rank if rank <= 2 else (_SIDE // 4, _SIDE // 4, *(4,) * (rank - 2))
    generator = torch.Generator().manual_seed(0)
    value, *grads = torch.randn(1 + _STEPS, *shape, generator=generator, dtype=torch.float64)
    options = {**options, "lr": _LR} if "lr" in options else options
    moved, again = (_results(optimizer, options, value, grads) for _ in range(2))
    if not _are_close(moved, again):
        raise NotAvailableError(
            f"optimizer={type(optimizer).__name__} draws random numbers, so ranks would update a parameter in unequal "
            "ways. Use an optimizer whose step() is deterministic, such as AdamW."
        )
    for dim in range(min(rank, 2)):
        half = [item.narrow(dim, 0, item.shape[dim] // 2) for item in (value, *grads)]
        alone = _results(optimizer, options, half[0], half[1:])
        expected = {
            name: item.narrow(dim, 0, item.shape[dim] // 2) if item.shape == value.shape else item
            for name, item in moved.items()
        }
        if not moved[""].any() or not _are_close(expected, alone):
            return False
    return True


def _results(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], value: torch.Tensor, grads: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return a dict with a parameter's change by trial steps under "", and its state as tensors by name."""
    after, state = _tried(optimizer, options, value, grads)
    held = {name: torch.as_tensor(item) for name, item in state.items() if isinstance(item, torch.Tensor | int | float)}
    return {"": after - value, **held}


def _are_close(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> bool:
    if expected.keys() != found.keys() or any(item.shape != found[name].shape for name, item in expected.items()):
        return False
    pairs = [(item.double(), found[name].double()) for name, item in expected.items() if item.numel()]
    return all(bool((one - two).abs().max() <= _TOLERANCE * one.abs().max()) for one, two in pairs)


def _tried(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], value: torch.Tensor, grads: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """Return the parameter `value` after a step with each of `grads`, and the state that an optimizer then keeps.

    Raises:
        NotAvailableError: a step fails.
    """
    trial = copy.copy(optimizer)
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    parameter = nn.Parameter(value.clone())
    trial.param_groups = [{**options, "params": [parameter]}]
    trial.state = defaultdict(dict)
    for grad in grads:
        parameter.grad = grad.clone()
        try:
            type(optimizer).step(trial)  # the object's own `step` may be that of a learning rate schedule
        except Exception as error:  # the step is the user's code
            raise NotAvailableError(
                f"optimizer={type(optimizer).__name__} fails on a small parameter of shape={tuple(value.shape)}, "
                f"with which compile tries it ({type(error).__name__}: {error}). Use an optimizer whose step() needs "
                "nothing but parameters, gradients and options of groups."
            ) from error
    return parameter.detach(), trial.state[parameter]


def _held_bytes(state: Mapping[str, Any]) -> int:
    return sum(item.nbytes for item in state.values() if isinstance(item, torch.Tensor) and item.numel() > 1)
