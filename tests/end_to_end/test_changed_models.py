"""A model that is changed after `compile` computes the same numbers as the changed model on one device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations

import autoshard
from autoshard import Mesh, TraceError
from autoshard.runtime.sharded_module import ShardedModule
from tests.end_to_end.training import plain_step
from tests.runtime.processes import on_processes

MESH = Mesh({"data": 2})
X = torch.linspace(-1, 1, 32).view(4, 8)


class Scale(nn.Module):
    """A module that multiplies its input by a class attribute."""

    factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Settled(nn.Module):
    """A model whose loss depends on attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.drop = nn.Linear(8, 8), nn.Linear(8, 4), nn.Dropout(0.0)
        self.scale = Scale()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.beta, self.sizes, self.last = 1.0, {"shift": [1, 2]}, 0.0
        self.table = torch.tensor([1.0, 2.0])
        self.config = SimpleNamespace(act="relu", inner=SimpleNamespace(power=2))

    def forward(self, x: torch.Tensor, weights: Any = None) -> torch.Tensor:
        y = getattr(torch, self.config.act)(self.up(x))
        for block in self.blocks:
            y = block(y)
        y = self.scale(self.down(self.drop(y))) * self.beta + sum(self.sizes["shift"]) + self.table.sum()
        if weights is not None:
            y = y * torch.from_numpy(weights).float().mean()
        return y.pow(self.config.inner.power).mean()


def hook_outputs(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 3


def hook_inputs(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0] + 1,)


def hook_gradients(_: nn.Module, grads: Any, __: Any) -> Any:
    return tuple(None if grad is None else grad * 2 for grad in grads)


def _set(path: str, value: Any) -> Callable[[Settled], None]:
    """Return a change that sets the attribute at a dotted path of the model to a value."""
    owner, _, name = path.rpartition(".")

    def change(model: Settled) -> None:
        target: Any = model
        for part in filter(None, owner.split(".")):
            target = getattr(target, part)
        setattr(target, name, value)

    return change


def _replace_method(model: Settled) -> None:
    model.scale.forward = lambda x: x * 7  # type: ignore[method-assign]


def _replace_block(model: Settled) -> None:
    torch.manual_seed(3)
    model.blocks[0] = nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def _add_block(model: Settled) -> None:
    torch.manual_seed(4)
    model.blocks.append(nn.Linear(8, 8))


def _replace_parameter(model: Settled) -> None:
    model.up.weight = nn.Parameter(torch.full((8, 8), 0.25))


CHANGES: dict[str, Callable[[Settled], Any]] = {
    "attribute": _set("beta", 3.0),
    "attribute of another type": _set("beta", 3),
    "attribute of a submodule": _set("scale.factor", 5.0),
    "element of a list in a dict": lambda model: model.sizes["shift"].append(4),
    "tensor in a plain attribute": _set("table", torch.ones(2)),
    "tensor changed in place": lambda model: model.table.mul_(3),
    "configuration": _set("config.act", "sigmoid"),
    "configuration within a configuration": _set("config.inner.power", 4),
    "dropout": _set("drop.p", 0.75),
    "method": _replace_method,
    "submodule": _set("up", nn.Identity()),
    "submodule of a list": _replace_block,
    "more submodules": _add_block,
    "fewer submodules": lambda model: model.blocks.pop(0),
    "root's submodule": _set("extra", nn.Linear(8, 8)),
    "parameter": _replace_parameter,
    "tied parameters": lambda model: setattr(model.blocks[0], "weight", model.up.weight),
    "frozen parameter": lambda model: model.up.weight.requires_grad_(False),
    "forward hook": lambda model: model.up.register_forward_hook(hook_outputs),
    "forward hook of the model": lambda model: model.register_forward_hook(hook_outputs),
    "forward pre-hook": lambda model: model.up.register_forward_pre_hook(hook_inputs),
    "backward hook": lambda model: model.down.register_full_backward_hook(hook_gradients),
    "weight norm": lambda model: parametrizations.weight_norm(model.up),
}


def compiled(model: nn.Module) -> ShardedModule:
    sharded = autoshard.compile(model, MESH)
    assert isinstance(sharded, ShardedModule)
    return sharded


def assert_alike(sharded: ShardedModule, model: nn.Module, *inputs: Any) -> None:
    """Check that the loss and the gradients of both models are equal."""
    found = []
    for called in (sharded, model):
        called.zero_grad()
        torch.manual_seed(0)
        loss = called(*inputs)
        loss.backward()
        found.append((loss, {name: parameter.grad for name, parameter in called.named_parameters()}))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str) -> None:
    """After a change, loss and gradients of the compiled model equal those of the changed model on one device."""
    model = Settled()
    reference = copy.deepcopy(model)
    sharded = compiled(model)
    assert_alike(sharded, reference, X)
    change = CHANGES[name]
    change(model)
    change(reference)
    if name == "dropout":  # its mask is not torch's
        assert not torch.equal(sharded(X), reference.eval()(X))
        return
    assert_alike(sharded, reference, X)


def test_a_removed_hook_is_noticed() -> None:
    """After a hook is removed, the compiled model equals one device and reuses the program from before the hook."""
    model = Settled()
    reference = copy.deepcopy(model)
    sharded = compiled(model)
    assert_alike(sharded, reference, X)
    handles = [item.up.register_forward_hook(hook_outputs) for item in (model, reference)]
    assert_alike(sharded, reference, X)
    for handle in handles:
        handle.remove()
    assert_alike(sharded, reference, X)
    assert len(sharded.programs) == 2


def test_a_class_that_is_changed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an attribute or method of a submodule's class changes, the compiled model equals one device."""
    model = Settled()
    sharded = compiled(model)
    assert_alike(sharded, model, X)
    monkeypatch.setattr(Scale, "factor", 9.0)
    assert_alike(sharded, model, X)
    monkeypatch.setattr(Scale, "forward", lambda self, x: x - 1)
    assert_alike(sharded, model, X)


def test_programs_are_kept_for_states_that_come_back(caplog: pytest.LogCaptureFixture) -> None:
    """An attribute that alternates between two values gives two programs, and the log names the attribute once."""
    model = Settled()
    sharded = compiled(model)
    with caplog.at_level(logging.INFO, logger="autoshard"):
        for _ in range(3):
            for beta in (1.0, 2.0):
                model.beta = beta
                sharded(X)
    assert len(sharded.programs) == 2
    assert sum("as beta changed" in record.message for record in caplog.records) == 1


def test_attributes_that_a_call_does_not_read_may_change(caplog: pytest.LogCaptureFixture) -> None:
    """A change of an attribute that no call reads causes no new trace or compilation."""
    model = Settled()
    sharded = compiled(model)
    with caplog.at_level(logging.INFO, logger="autoshard"):
        for _ in range(3):
            model.last = sharded(X).item()
            model.started = object()  # type: ignore[assignment]
    assert len(caplog.records) == 1


class TwoResults(Settled):
    """A model that returns a loss and logits."""

    def forward(self, x: torch.Tensor, weights: Any = None) -> Any:
        return super().forward(x, weights), self.up(x) * self.beta


def test_the_loss_is_differentiated_as_it_was_called() -> None:
    """A change of the model between forward and backward does not change the gradients of the loss."""
    model = TwoResults()
    reference = copy.deepcopy(model)
    losses = [net(X)[0] for net in (compiled(model), reference)]
    for net, loss in zip((model, reference), losses, strict=True):
        net.beta = 7.0
        net.eval()
        loss.backward()
    torch.testing.assert_close(model.up.weight.grad, reference.up.weight.grad)


@pytest.mark.parametrize("name", ["beta", "training"])
def test_a_backward_that_traces_again_refuses_a_changed_model(name: str) -> None:
    """A backward from logits, which traces the model again, raises if the model changed since the forward."""
    model = TwoResults()
    sharded = compiled(model)
    _, logits = sharded(X)
    if name == "beta":
        model.beta = 7.0
    else:
        sharded.eval()
    with pytest.raises(TraceError, match=rf"changed between forward and backward \({name}\)"):
        logits.sum().backward()


class Stepping(nn.Module):
    """A model that logs a step number, which its user sets, and doubles the loss from step `begin` on."""

    def __init__(self, *, begin: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.begin, self.step, self.loss = nn.Linear(8, 4), begin, 0, 0.5
        self.logged: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.step % 2 == 0 and self.loss < 1e6:
            self.logged.append(self.step)
        y = self.layer(x).square().mean()
        return y * 2 if self.begin is not None and self.step >= self.begin else y


@pytest.mark.parametrize("begin", [None, 6])
def test_what_is_done_with_numbers_is_guarded(begin: int | None, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers that change at each call are traced as constants thrice, then only when a comparison's result changes."""
    model = Stepping(begin=begin)
    reference = copy.deepcopy(model)
    sharded = compiled(model)
    with caplog.at_level(logging.INFO, logger="autoshard"):
        for step in range(16):
            model.step = reference.step = step
            model.loss = reference.loss = 1 / (step + 1)
            torch.testing.assert_close(sharded(X), reference(X))
    traced = sum("planning anew" in record.message for record in caplog.records)
    said = [record.message for record in caplog.records if "from call to call" in record.message]
    assert traced == (4 if begin is None else 9)
    assert [message.partition(" changes")[0] for message in said] == ["step", "loss"]
    assert {type(step) for step in model.logged} == {int}
    assert len(sharded.programs) == (1 if begin is None else 2)


def test_the_whole_step_notices() -> None:
    """A traced training step of a model whose attribute changes equals one device."""
    model = Settled()
    reference = copy.deepcopy(model)
    step = autoshard.compile(model, MESH, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for beta in (1.0, 1.0, 0.5):
        model.beta = reference.beta = beta
        torch.testing.assert_close(step(X), plain_step(reference, optimizer, X))
    torch.testing.assert_close(dict(model.named_parameters()), dict(reference.named_parameters()))


def test_a_loss_with_another_tensor_is_noticed() -> None:
    """Changed tensors and options of `loss_fn` take effect from the next step on."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 3), torch.randn(4, 8), torch.tensor([0, 1, 2, 1])
    loss_fn = nn.CrossEntropyLoss(weight=torch.rand(3))
    step = autoshard.compile(model, MESH, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_fn)

    for change in (
        lambda: None,
        lambda: loss_fn.weight.mul_(torch.tensor([1.0, 2.0, 3.0])),
        lambda: setattr(loss_fn, "weight", torch.rand(3)),
        lambda: setattr(loss_fn, "label_smoothing", 0.1),
    ):
        change()
        expected = loss_fn(model(x), y).detach()
        torch.testing.assert_close(step(x, y), expected)
    assert len(step.sharded.programs) == 4


def test_numpy_arguments_are_told_apart_by_all_their_elements() -> None:
    """Two arrays that differ in one of 5000 elements, which their text omits, get two programs."""
    model = Settled()
    sharded = compiled(model)
    weights = np.ones(5000)
    other = weights.copy()
    other[2000] = 1e4
    for array in (weights, other, weights.copy()):
        assert_alike(sharded, model, X, array)
    assert len(sharded.programs) == 2


def check_changes() -> None:
    """On two ranks, changes without new parameters give the loss of the changed model on one device."""
    model = Settled()
    reference = copy.deepcopy(model)
    sharded = compiled(model)
    for change in (lambda net: None, CHANGES["attribute"], CHANGES["forward hook"], CHANGES["fewer submodules"]):
        change(model)
        change(reference)
        model.started = dist.get_rank()  # type: ignore[assignment]
        torch.testing.assert_close(sharded(X).detach(), reference(X).detach())


def check_new_parameters() -> None:
    """A call after a layer was added raises an error that names its parameters, and the model can be compiled again."""
    model = Settled()
    sharded = compiled(model)
    sharded(X)
    _add_block(model)
    with pytest.raises(TraceError, match=r"given parameters after it was compiled.*: blocks\.1\.weight, blo"):
        sharded(X)
    reference = Settled()
    _add_block(reference)
    torch.testing.assert_close(compiled(model)(X).detach(), reference(X).detach())


CHECKS = {"changes": check_changes, "new parameters": check_new_parameters}
test_on_processes = on_processes(CHECKS, ranks=2)
