"""Loading the states of a run: places of tensors, and extra state of modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard import Checkpoints


class Held:
    """An object of the user, whose state is a dict of tensors."""

    def __init__(self, **state: torch.Tensor) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_tensors_that_share_memory_load_different_values(tmp_path: Path) -> None:
    """An average that begins as the weights themselves does not change them, nor does a tensor under two names."""
    model, shared = nn.Linear(2, 2), torch.zeros(2)
    bias = model.bias.detach().clone()
    saved = {"average": torch.ones(2), "first": torch.full((2,), 2.0), "second": torch.full((2,), 3.0)}
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(model, at=1, held=Held(**saved))
    fresh = Held(average=model.bias.detach(), first=shared, second=shared)
    checkpoints.load(model, held=fresh)
    torch.testing.assert_close(fresh.state, saved)
    torch.testing.assert_close(model.bias.detach(), bias)


def test_a_place_holds_each_element(tmp_path: Path) -> None:
    """Tensors without memory of their own, expanded or on meta, are loaded into new ones."""
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(model, at=1, held=Held(a=torch.arange(2.0), b=torch.ones(2)))
    fresh = Held(a=torch.zeros(1).expand(2), b=torch.ones(2, device="meta"))
    checkpoints.load(model, held=fresh)
    torch.testing.assert_close(fresh.state, {"a": torch.arange(2.0), "b": torch.ones(2)})
