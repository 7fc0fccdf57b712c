"""A traced step looks up the program of each micro-batch once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard.runtime.sharded_module import ShardedModule


class Branching(nn.Module):
    """A loss that branches on the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (y * 2 if bool((x > 0).any()) else y).pow(2).mean()


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_programs_are_looked_up_once(micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step looks up a program once per micro-batch, also if the model branches on values."""
    torch.manual_seed(0)
    model, x = Branching(), torch.rand(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autoshard.compile(model, autoshard.Mesh({"data": 2}), optimizer=optimizer, micro_batches=micro_batches)
    step(x)
    assert step.is_traced
    looked_up = []
    find = ShardedModule._find
    monkeypatch.setattr(
        ShardedModule,
        "_find",
        lambda self, call, *rest, **named: looked_up.append(call) or find(self, call, *rest, **named),
    )
    step(x)
    assert len(looked_up) == micro_batches
