"""Trial steps on small parameters tell how much state an optimizer keeps, and which parameters it needs whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard import JoinedOptimizer
from autoshard.errors import NotAvailableError
from autoshard.runtime.tried_optimizer import parameters_needed_whole, state_bytes_per_parameter_byte
from tests.own_optimizers import Failing, Lion, Noisy, Shampoo

MATRIX, VECTOR = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))
KERNEL = nn.Parameter(torch.ones(2, 2, 3, 3))


def _whole(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(item) for item in parameters_needed_whole(optimizer)}


@pytest.mark.parametrize("name", ["Adagrad", "Adadelta", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD"])
def test_elementwise_optimizers_of_torch_may_be_split(name: str) -> None:
    """Torch's elementwise optimizers need no parameter whole."""
    assert not _whole(getattr(torch.optim, name)([MATRIX, VECTOR], lr=0.1))


@pytest.mark.parametrize("name", ["Adafactor", "Rprop"])
def test_other_optimizers_of_torch_need_whole_parameters(name: str) -> None:
    """Adafactor and Rprop need every parameter whole.

    Adafactor uses whole matrices, and torch does not run Rprop on split DTensors.
    """
    assert _whole(getattr(torch.optim, name)([MATRIX, VECTOR])) == {id(MATRIX), id(VECTOR)}


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_own_optimizers_are_tried(lr: float) -> None:
    """Lion may split parameters, and Shampoo needs its parameters whole, also at a learning rate of zero."""
    assert not _whole(Lion([MATRIX, VECTOR, KERNEL], lr=lr))
    assert _whole(Shampoo([MATRIX], lr=lr)) == {id(MATRIX)}
    assert _whole(Shampoo([KERNEL], lr=lr)) == {id(KERNEL)}
    assert _whole(JoinedOptimizer(Lion([VECTOR]), Shampoo([MATRIX]))) == {id(MATRIX)}


def test_a_trial_leaves_the_optimizer_alone() -> None:
    """A trial step changes no parameter, state or schedule of the optimizer, and calls no hook."""
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = Lion([parameter])
    called: list[object] = []
    optimizer.register_step_pre_hook(lambda *args: called.append(args))
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    parameter.grad = torch.ones(3, 2)
    assert not _whole(optimizer)
    assert state_bytes_per_parameter_byte(optimizer) == 1.0
    assert torch.equal(parameter, torch.ones(3, 2))
    assert not optimizer.state
    assert not called
    assert schedule.last_epoch == 0


def test_bytes_of_state() -> None:
    """State is counted in bytes per parameter byte; joined optimizers have the largest of their values."""
    assert state_bytes_per_parameter_byte(torch.optim.AdamW([MATRIX])) == 2.0
    assert state_bytes_per_parameter_byte(torch.optim.SGD([MATRIX])) == 0.0
    assert state_bytes_per_parameter_byte(torch.optim.Adagrad([MATRIX])) == 1.0
    joined = JoinedOptimizer(torch.optim.Muon([MATRIX]), torch.optim.AdamW([VECTOR]))
    assert state_bytes_per_parameter_byte(joined) == 2.0


def test_random_steps_are_refused() -> None:
    """An optimizer that draws random numbers is refused, since ranks would draw different ones."""
    with pytest.raises(NotAvailableError, match="optimizer=Noisy draws random numbers"):
        parameters_needed_whole(Noisy([MATRIX]))


def test_a_step_that_fails_alone_is_refused() -> None:
    """An optimizer whose trial step raises is refused by an error with its name and the cause."""
    with pytest.raises(NotAvailableError, match=r"optimizer=Failing fails on a small.*KeyError: 'layer name'"):
        state_bytes_per_parameter_byte(Failing([MATRIX]))
