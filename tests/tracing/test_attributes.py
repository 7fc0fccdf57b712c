"""A traced model keeps nothing of the trace, and what it keeps between calls does not disturb it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoshard.tracing import trace
from autoshard.tracing.attributes import keeping_attributes


class Keeps(nn.Module):
    """Keeps a table of biases from its first call on, as some vision models do in evaluation, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))
        self.inner = nn.Linear(4, 4)
        self.tables: dict[str, torch.Tensor] = {}
        self.seen: list[int] = []
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "bias" not in self.tables:
            self.tables["bias"] = self.bias * 2
        self.last = x
        self.seen.append(len(x))
        self.calls += 1
        return (self.inner(x) + self.tables["bias"]).square().sum()


def test_a_model_that_keeps_tensors_is_traced_and_left_as_it_was() -> None:
    """The program has the gradient of what was kept; the model can still be called."""
    model, x = Keeps(), torch.randn(2, 4)
    program = trace(model, (x,), {})
    assert {slot.name for slot in program.outputs} >= {"bias", "inner.weight"}
    assert (model.tables, model.seen, model.calls, hasattr(model, "last")) == ({}, [], 0, False)
    model(x).backward()
    assert model.bias.grad is not None


def test_attributes_are_restored_after_an_error() -> None:
    """What was bound, replaced, filled or deleted in a failing call is as before."""
    model = Keeps()
    table, model.tables["old"] = model.tables, torch.ones(1)
    state = _state(model)
    try:
        with keeping_attributes(model):
            model.tables = {}
            table.clear()
            del model.calls
            model.inner.note = "new"  # type: ignore[assignment]
            raise RuntimeError("stop")
    except RuntimeError:
        pass
    assert _state(model) == state
    assert model.tables is table
    assert not hasattr(model.inner, "note")


def _state(model: Keeps) -> tuple[Any, ...]:
    return dict(model.tables), list(model.seen), model.calls
