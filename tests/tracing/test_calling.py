"""Split a call's arguments between the model and the loss, and refuse tensors that a program cannot keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

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
    """Required arguments of the loss behind the outputs are the call's last arguments."""
    loss, targets = LOSSES[name]
    assert count_targets(nn.Linear(2, 2), loss, 3) == targets


def test_a_loss_of_more_targets_than_there_are_arguments_is_refused() -> None:
    """The message says both numbers."""
    with pytest.raises(TraceError, match=r"takes 3 targets after the outputs, .* only 2 positional arguments"):
        count_targets(nn.Linear(2, 2), LOSSES["of three targets"][0], 2)


def test_a_buffer_that_is_a_parameter_is_named() -> None:
    """A parameter registered once more as a buffer is refused by both names."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("teacher", model[0].weight)
    with pytest.raises(TraceError, match=r"Buffer 'teacher' of Sequential is parameter '0\.weight' itself"):
        trace(model, (torch.ones(2),))
