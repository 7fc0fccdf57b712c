"""A step runs its micro-batches in an order that was verified."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoshard
from autoshard.ir.pipeline_order import PipelineOrder, StageTask, Work, one_after_another
from autoshard.runtime import train_step

FORWARD, BACKWARD = Work.FORWARD, Work.BACKWARD
MICRO_BATCHES = 2


class Model(nn.Module):
    """A model that returns a loss, and keeps a scalar of the last forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.detach().mean()
        return self.linear(x).pow(2).mean() + self.linear(x).mean()


def trained(order: Callable[[int], PipelineOrder], monkeypatch: pytest.MonkeyPatch, *, verify: bool) -> dict:
    """Return the second loss, and the state after two steps in a given order of tasks."""
    monkeypatch.setattr(train_step, "one_after_another", order)
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"micro_batches": MICRO_BATCHES, "max_grad_norm": 0.5, "verify": verify}
    step = autoshard.compile(model, autoshard.Mesh({"data": 2}), optimizer=optimizer, **options)
    assert step.is_traced
    losses = [step(x) for _ in range(2)]
    return {
        "loss": losses[-1],
        "last": model.last,
        **{name: copy.copy(value) for name, value in step.sharded.state_dict().items()},
    }


def order_of(*tasks: tuple[Work, int]) -> PipelineOrder:
    return PipelineOrder((0,), MICRO_BATCHES, (tuple((StageTask(work, 0, number),) for work, number in tasks),))


def forwards_first(micro_batches: int) -> PipelineOrder:
    return order_of(*((work, number) for work in (FORWARD, BACKWARD) for number in range(micro_batches)))


def without_a_backward(micro_batches: int) -> PipelineOrder:
    return order_of(
        (FORWARD, 0), *((work, number) for number in range(1, micro_batches) for work in (FORWARD, BACKWARD))
    )


def last_first(micro_batches: int) -> PipelineOrder:
    return order_of(*((work, number) for number in reversed(range(micro_batches)) for work in (FORWARD, BACKWARD)))


@pytest.mark.parametrize(
    ("name", "words"), [("eval", "The model has: step.sharded.eval."), ("evaluate", "'evaluate'.")]
)
def test_a_missing_attribute_names_that_of_the_model(name: str, words: str) -> None:
    """A step lacks the model's methods, and its error says where they are."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    step = autoshard.compile(model, autoshard.Mesh({"data": 2}), optimizer=optimizer, loss_fn=nn.functional.mse_loss)
    with pytest.raises(AttributeError, match=rf"A compiled step has no attribute '{name}'.*") as caught:
        getattr(step, name)
    assert str(caught.value).endswith(words)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_a_norm_may_be_a_number_of_numpy(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """A NumPy number as `max_grad_norm` clips as the equal Python number, traced or not."""
    found, x = [], torch.ones(8, 4)
    for norm in (0.5, np.float32(0.5)):
        torch.manual_seed(0)
        model = Model()
        optimizer = kind(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"optimizer": optimizer, "max_grad_norm": norm}
        step = autoshard.compile(model, autoshard.Mesh({"data": 2}), **options)
        step(x)
        step.max_grad_norm = norm / 2
        step(x)
        found.append(model.linear.weight.detach())
    assert torch.equal(*found)


def test_another_right_order_trains_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """All forwards before all backwards train as each forward followed by its backward."""
    usual = trained(one_after_another, monkeypatch, verify=True)
    other = trained(forwards_first, monkeypatch, verify=True)
    assert usual.keys() == other.keys()
    for name, value in usual.items():
        torch.testing.assert_close(other[name], value)


@pytest.mark.parametrize("wrong", [without_a_backward, last_first])
def test_wrong_orders_change_numbers_and_are_refused(
    wrong: Callable[[int], PipelineOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order that lacks a backward or starts at the last micro-batch changes results, and is not verified."""
    usual = trained(one_after_another, monkeypatch, verify=True)
    other = trained(wrong, monkeypatch, verify=False)
    assert any(not torch.allclose(other[name], value) for name, value in usual.items())
    with pytest.raises(autoshard.VerificationError, match="stage 0 runs"):
        trained(wrong, monkeypatch, verify=True)
