"""Split a call's arguments between the model and the loss, and refuse tensors that a program cannot keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import TraceError
from autoshard.tracing import trace
from autoshard.tracing.calling import count_targets

LOSSES: dict[str, tuple[Callable[..., Any], int]] = {
    "of outputs": (lambda outputs: outputs, 0),
    "of one target": (lambda outputs, one: outputs, 1),
    "of three targets": (lambda outputs, one, two, three: outputs, 3),
    "with an option": (lambda outputs, one, weight=None: outputs, 1),
    "of what the model leaves": (lambda outputs, *targets: outputs, 2),
    "a module": (nn.MSELoss(), 1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_takes_its_required_arguments_behind_the_outputs(name: str) -> None:
    """The loss takes as many targets, after the outputs, as it has further required arguments."""
    loss, targets = LOSSES[name]
    assert count_targets(nn.Linear(2, 2), loss, 3) == targets


def test_a_loss_of_more_targets_than_there_are_arguments_is_refused() -> None:
    """The error names the three targets of the loss and the two arguments of the call."""
    with pytest.raises(TraceError, match=r"takes 3 targets after the outputs, .* only 2 positional arguments"):
        count_targets(nn.Linear(2, 2), LOSSES["of three targets"][0], 2)


def _doubled() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))


def test_a_parameter_that_shares_its_memory_is_named() -> None:
    """A trainable parameter that shares memory with another is refused by name, because one device would update
    both. Frozen parameters may share memory."""
    model = _doubled()
    model[1].weight.data = model[0].weight.data
    with pytest.raises(TraceError, match=r"Parameter '1\.weight' of Sequential shares its memory with parameter '0\.w"):
        trace(model, (torch.ones(2),))
    with pytest.raises(TraceError, match="shares its memory"):
        autoshard.compile(model, autoshard.Mesh({"data": 2}))
    trace(model.requires_grad_(False), (torch.ones(2),))


def test_a_lazy_parameter_is_named() -> None:
    """A lazy parameter is refused by name, because its shape is unknown before a call."""
    with pytest.raises(TraceError, match=r"'weight' of LazyLinear has no shape yet"):
        autoshard.compile(nn.LazyLinear(2), autoshard.Mesh({"data": 2}))


@pytest.mark.parametrize("detached", [False, True])
def test_a_buffer_that_shares_its_memory_is_named(detached: bool) -> None:
    """A buffer that is a parameter, or a detached view of one, is refused by name."""
    model = _doubled()
    model.register_buffer("teacher", model[0].weight.detach() if detached else model[0].weight)
    with pytest.raises(
        TraceError, match=r"Buffer 'teacher' of Sequential shares its memory with parameter '0\.weight'"
    ):
        trace(model, (torch.ones(2),))


def test_tied_parameters_and_slices_of_one_tensor_are_apart() -> None:
    """One parameter may have two names, and two parameters may be slices of one tensor."""
    model = _doubled()
    model[1].weight = model[0].weight
    trace(model, (torch.ones(2),))
    flat, model = torch.ones(4, 2), _doubled()
    model[0].weight, model[1].weight = (nn.Parameter(part) for part in flat.split(2))
    trace(model, (torch.ones(2),))
