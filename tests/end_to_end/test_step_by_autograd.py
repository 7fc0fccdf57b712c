"""A step that hooks or earlier gradients force through autograd equals one device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh, P
from autoshard.runtime.train_step import TrainStep
from tests.end_to_end.training import plain_step, whole
from tests.models import Perceptron
from tests.runtime.processes import on_processes

MESH = Mesh({"data": 2})
X = torch.linspace(-1, 1, 48).view(8, 6)
ZERO_1 = {"up.*": P(), "down.*": P(), "*:*weight": P("data"), "input:*": P("data")}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-4)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


Change = Callable[[nn.Module, torch.optim.Optimizer], Any]


def _ignore(model: nn.Module, _: Any) -> Any:
    return model.get_parameter("up.weight").register_hook(lambda grad: grad * 0)


def _double(model: nn.Module, _: Any) -> Any:
    def double(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    return model.get_parameter("down.bias").register_post_accumulate_grad_hook(double)


def _clip(_: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def clip(mine: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in mine.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    return optimizer.register_step_pre_hook(clip)


CHANGES: dict[str, Change] = {"gradient hook": _ignore, "accumulation hook": _double, "optimizer hook": _clip}
MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {"adamw": adamw, "momentum": momentum}


def check_step(mesh: Mesh, change: Change, make: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
    """Check that steps with a hook, without it, and onto earlier gradients equal one device."""
    model = Perceptron(6, 8, 4)
    reference = copy.deepcopy(model)
    optimizer, plain = make(model), make(reference)
    step = autoshard.compile(model, mesh, optimizer=optimizer, **options)
    assert isinstance(step, TrainStep)
    assert step.is_traced

    def check_steps(number: int) -> None:
        for _ in range(number):
            torch.testing.assert_close(whole(step(X)), plain_step(reference, plain, X))

    check_steps(2)
    handles = [change(step.sharded, optimizer), change(reference, plain)]
    check_steps(2)
    for handle in handles:
        handle.remove()
    check_steps(2)
    step.sharded(X * 2).backward()
    reference(X * 2).backward()
    check_steps(2)
    found = {name: whole(item) for name, item in step.sharded.named_parameters()}
    torch.testing.assert_close(found, dict(reference.state_dict()), rtol=1e-5, atol=1e-6)
    states = [item.state for item in (optimizer, plain)]
    assert [len(state) for state in states] == [4, 4]


@pytest.mark.sample(3)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", CHANGES)
def test_hooks_run_and_gradients_are_added(name: str, make: str) -> None:
    """Steps with a hook, and steps that add to earlier `.grad` values, equal one device."""
    check_step(MESH, CHANGES[name], MAKERS[make])


def test_the_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """The log says once that a parameter has hooks on its gradient, and names the parameter."""
    model = Perceptron(6, 8, 4)
    step = autoshard.compile(model, MESH, optimizer=adamw(model))
    model.up.weight.register_hook(lambda grad: grad)
    with caplog.at_level(logging.WARNING, logger="autoshard"):
        step(X)
        step(X)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "parameter 'up.weight' has hooks on its gradient"
    ]


def test_parameters_may_come_later() -> None:
    """After a layer is added with its own parameter group and another is frozen, steps equal one device."""
    model = Perceptron(6, 8, 4)
    reference = copy.deepcopy(model)
    optimizer, plain = adamw(model), adamw(reference)
    step = autoshard.compile(model, MESH, optimizer=optimizer)
    torch.testing.assert_close(step(X), plain_step(reference, plain, X))
    for item, its in ((model, optimizer), (reference, plain)):
        torch.manual_seed(1)
        added = nn.Linear(8, 8)
        setattr(item, "up", nn.Sequential(item.up, added))  # noqa: B010
        its.add_param_group({"params": list(added.parameters()), "lr": 0.1})
        item.down.weight.requires_grad_(False)
    for _ in range(2):
        torch.testing.assert_close(step(X), plain_step(reference, plain, X))
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()), rtol=1e-5, atol=1e-6)


def test_parameters_that_the_optimizer_lost_are_named() -> None:
    """If a parameter is replaced, so that the optimizer has the old one, the step raises."""
    model = Perceptron(6, 8, 4)
    step = autoshard.compile(model, MESH, optimizer=adamw(model))
    step(X)
    model.up.weight = nn.Parameter(torch.zeros(8, 6))
    with pytest.raises(autoshard.TraceError, match="1 parameters in group 0 that are not the model's"):
        step(X)


def test_a_failed_step_leaves_earlier_gradients() -> None:
    """After a float16 step raises, a gradient from before the step is unchanged."""
    model = nn.Linear(6, 2)
    step = autoshard.compile(model, MESH, optimizer=momentum(model), precision="f16")
    model.weight.grad = torch.ones(2, 6)
    with pytest.raises(autoshard.TraceError, match="no floating scalar"):
        step(X)
    assert torch.equal(model.weight.grad, torch.ones(2, 6))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_steps_without_gradients_enabled_train(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """Under `no_grad` and `inference_mode`, steps train as on one device, whether traced or not."""
    model, reference = nn.Linear(6, 1), nn.Linear(6, 1)
    reference.load_state_dict(model.state_dict())
    optimizer, plain = kind(model.parameters(), lr=0.1), kind(reference.parameters(), lr=0.1)
    step = autoshard.compile(model, MESH, optimizer=optimizer, loss_fn=lambda y: y.square().mean())
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            found = step(X)
        reference(X).square().mean().backward()
        plain.step()
        plain.zero_grad()
        assert not found.requires_grad
        torch.testing.assert_close(model.weight, reference.weight)


CHECKS = {
    f"{name}, {make}": partial(check_step, MESH, CHANGES[name], MAKERS[make], constraints=ZERO_1)
    for name in ("gradient hook", "optimizer hook")
    for make in MAKERS
}
test_on_processes = on_processes(CHECKS, ranks=2, sample=2)
