"""Hooks of modules that change results are part of the program, and hooks that only read are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from autoshard import TraceError
from autoshard.tracing import trace
from tests.models import Perceptron

X = torch.linspace(-1, 1, 8).view(2, 4)


class Collecting(Perceptron):
    """A model that collects an activation by its own hook, and computes with the activation."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.found: list[torch.Tensor] = []
        self.up.register_forward_hook(self.collect)

    def collect(self, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        self.found.append(output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.clear()
        return super().forward(x) + self.found[0].sum()


def look(kept: list[Any], *args: Any) -> None:
    kept.append(args)


def look_and_return(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output


class Looks:
    """A hook that is an object."""

    def __call__(self, *_: Any) -> None:
        pass


IDLE: dict[str, Callable[[nn.Module], Any]] = {
    "look": lambda module: module.register_forward_hook(partial(look, [])),
    "look_and_return": lambda module: module.register_forward_hook(look_and_return),
    "Looks": lambda module: module.register_forward_pre_hook(Looks()),
    "<lambda>": lambda module: module.register_full_backward_hook(lambda *_: None),
}


def scale_in_place(_: nn.Module, __: Any, output: torch.Tensor) -> None:
    output.mul_(2)


def fill_weight(module: nn.Module, _: Any) -> None:
    module.extra = module.weight.sum()  # type: ignore[operator]


@pytest.mark.parametrize("name", IDLE)
def test_hooks_that_only_look_are_refused(name: str) -> None:
    """A hook that only reads is refused with its name and its module's, and the model keeps its hooks."""
    model = Perceptron(4, 4)
    IDLE[name](model.down)
    before = [dict(module._forward_hooks) for module in model.modules()]
    with pytest.raises(TraceError, match=rf"hook '{name}' on module 'down', without which it computes the same"):
        trace(model, (X,))
    assert [dict(module._forward_hooks) for module in model.modules()] == before


def test_one_hook_of_two_is_refused() -> None:
    """If a model computes with one hook, a second hook that only reads is still refused, by name."""
    model = Collecting()
    trace(model, (X,))
    model.down.register_forward_hook(partial(look, []))
    with pytest.raises(TraceError, match="runs hook 'look' on module 'down', without"):
        trace(model, (X,))


def test_a_hook_on_every_module_is_refused() -> None:
    """A hook on all modules that only reads is refused by name."""
    handle = register_module_forward_hook(partial(look, []))
    try:
        with pytest.raises(TraceError, match="hook 'look' on every module"):
            trace(Perceptron(4, 4), (X,))
    finally:
        handle.remove()


def test_hooks_that_act_are_traced() -> None:
    """Hooks that change an output in place, or a weight, are traced, and a note of the program names them."""
    model = Perceptron(4, 4)
    plain = trace(Perceptron(4, 4), (X,)).digest()
    model.up.register_forward_hook(scale_in_place)
    model.down.register_forward_pre_hook(fill_weight)
    program = trace(model, (X,))
    assert program.digest() != plain
    (note,) = [note for note in program.python.notes if "hook" in note]
    assert "hook 'scale_in_place' on module 'up' and hook 'fill_weight' on module 'down'" in note


@pytest.mark.parametrize("apply", [weight_norm, spectral_norm, parametrizations.weight_norm, prune.random_unstructured])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_hooks_of_torch_are_traced_without_a_word(apply: Callable[..., Any]) -> None:
    """Torch's own hooks and parametrizations, for norms and pruning, are traced without a note."""
    model = Perceptron(4, 4)
    options = {"amount": 0.5} if apply is prune.random_unstructured else {}
    apply(model.up, "weight", **options)
    program = trace(model, (X,))
    assert not any("hook" in note for note in program.python.notes)
