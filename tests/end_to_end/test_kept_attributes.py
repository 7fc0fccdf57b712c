"""A compiled call sets the attributes that the model's own call sets, or a warning names those it cannot set."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep
from tests.end_to_end.training import whole
from tests.runtime.processes import on_processes

MESH = Mesh({"data": 2})
X = torch.linspace(-1, 1, 48).view(8, 6)


class Router(nn.Module):
    """A module whose call sets an auxiliary loss, a detached figure and a number of rows as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.aux = 0.0
        self.rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gate(x).softmax(-1)
        self.aux = y.mean(0).square().sum()
        self.largest = y.max().detach()
        self.rows = x.shape[0]
        return y * x


class Net(nn.Module):
    """A router within a model that returns a loss, or only logits, and sets an attribute."""

    def __init__(self, *, has_loss: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.down, self.has_loss = Router(), nn.Linear(6, 4), has_loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.router(x))
        self.has_run = True
        return y.square().mean() if self.has_loss else y


def compiled(model: nn.Module) -> ShardedModule:
    sharded = autoshard.compile(model, MESH)
    assert isinstance(sharded, ShardedModule)
    return sharded


def check_kept(*, has_loss: bool) -> None:
    """Check that loss, attributes and gradients equal one device, for two batch sizes in turn."""
    model = Net(has_loss=has_loss)
    reference = copy.deepcopy(model)
    sharded = compiled(model)
    for x in (X, X[:4], X):
        found: list[Any] = []
        for net in (sharded, reference):
            net.zero_grad()
            loss = net(x).square().mean() + 0.1 * net.router.aux
            loss.backward()
            found.append((loss, net.router.aux, net.router.largest))
            assert net.router.rows == len(x)
            assert net.has_run
        torch.testing.assert_close(*found)
        for name, parameter in reference.named_parameters():
            grad = sharded.get_parameter(name).grad
            assert grad is not None
            torch.testing.assert_close(whole(grad), parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("has_loss", [True, False])
def test_scalars_are_left_with_their_gradients(has_loss: bool) -> None:
    """An auxiliary loss in an attribute has gradients as on one device, whether the model returns a loss or logits."""
    check_kept(has_loss=has_loss)


test_scalars_are_left_on_processes = on_processes({"kept": partial(check_kept, has_loss=True)}, ranks=2)


def test_a_step_leaves_them_too() -> None:
    """A traced training step sets the attributes of one device, and trains on the returned loss alone."""
    model = Net()
    reference = copy.deepcopy(model)
    step = autoshard.compile(model, MESH, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    assert isinstance(step, TrainStep)
    torch.testing.assert_close(step(X), reference(X).detach())
    torch.testing.assert_close(model.router.aux, reference.router.aux.detach())  # type: ignore[attr-defined]
    assert model.router.rows == 8


def test_a_step_takes_no_attribute_for_its_loss() -> None:
    """A training step of a model that returns logits raises, although an attribute holds a loss."""
    model = Net(has_loss=False)
    step = autoshard.compile(model, MESH, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(autoshard.TraceError, match="returns no floating scalar"):
        step(X)


class Keeps(nn.Module):
    """A model that stores an activation, a list of activations, a cached table and a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.seen: list[torch.Tensor] = []
        self.table: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(6.0)
        self.last = self.layer(x)
        self.seen.append(self.last)
        return (self.last + self.table).square().mean()


def test_what_is_not_left_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Attributes that a compiled call cannot set are named in one warning, stay unset, and cause no new compilation."""
    model = Keeps()
    reference = copy.deepcopy(model)
    sharded = compiled(model)
    with caplog.at_level(logging.WARNING, logger="autoshard"):
        for x in (X, X, X[:4]):
            torch.testing.assert_close(sharded(x), reference(x))
    kept, counted = sorted(record.message for record in caplog.records)[::-1]
    assert "keeps tensors in seen, table, last when it is called" in kept
    assert "changes calls with every call" in counted
    assert (model.seen, model.table, hasattr(model, "last")) == ([], None, False)
    assert len(sharded.programs) == 2


class Modes(nn.Module):
    """A model that sets an attribute according to its mode, and then reads the attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mode = nn.Linear(6, 6), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mode = "training" if self.training else "evaluation"
        return (self.layer(x) * len(self.mode)).square().mean()


def test_attributes_that_are_set_first_compile_nothing_anew() -> None:
    """Training and evaluation in turn make two programs, and each call sets the attribute of its mode."""
    model = Modes()
    reference = copy.deepcopy(model)
    sharded = compiled(model)
    for _ in range(3):
        for training in (True, False):
            torch.testing.assert_close(sharded.train(training)(X), reference.train(training)(X))
            assert model.mode == reference.mode
    assert len(sharded.programs) == 2
