"""The loss that a step returns acts as a plain tensor, except that a backward of it raises."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoshard


@pytest.fixture(params=["SGD", "RMSprop"])
def loss(request: pytest.FixtureRequest) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = getattr(torch.optim, request.param)(model.parameters(), lr=0.1)
    step = autoshard.compile(
        model, autoshard.Mesh({"data": 2}), optimizer=optimizer, loss_fn=lambda made: made.square().mean()
    )
    return step(torch.randn(4, 4))


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "backward",
    [
        lambda loss: loss.backward(),
        lambda loss: (loss / 4).backward(),
        lambda loss: (2 * loss.mean() * 8).backward(retain_graph=True),
        lambda loss: torch.autograd.backward(loss),
        lambda loss: torch.autograd.grad(loss, torch.ones(1, requires_grad=True)),
        lambda loss: torch.amp.GradScaler("cpu").scale(loss).backward(),
    ],
)
def test_a_backward_says_that_it_has_run(backward: Callable[[torch.Tensor], Any], loss: torch.Tensor) -> None:
    with pytest.raises(autoshard.NotAvailableError, match=r"the step has already run the backward, and the optimizer"):
        backward(loss)


def test_results_are_plain(loss: torch.Tensor) -> None:
    """Results computed from a step's loss, and copied or loaded losses, are plain tensors with its value.

    A product with another tensor gives that tensor its gradient.
    """
    total = torch.zeros(())
    total += loss
    kept = io.BytesIO()
    torch.save({"loss": loss}, kept)
    kept.seek(0)
    loaded = torch.load(kept, weights_only=True)["loss"]
    for made in (total, loss + 1, torch.stack([loss, loss]), loss.detach(), copy.deepcopy(loss), loaded, loss.cpu()):
        assert type(made) is torch.Tensor
    number = loss.item()
    assert float(loss) == number == float(np.asarray(loss)) == loaded.item() == total.item()
    assert f"{loss:.2f}" == f"{number:.2f}"
    assert repr(loss) == repr(loss.detach())
    assert (isinstance(loss, torch.Tensor), loss.shape, loss.requires_grad) == (True, (), False)
    other = torch.ones((), requires_grad=True)
    (loss * other).backward()
    assert other.grad == loss
