"""A trace leaves no tensor of its own in the model, and a model's kept tensors do not disturb the trace."""

from __future__ import annotations

import types

import torch
from torch import nn

from autoshard.tracing import trace
from autoshard.tracing.attributes import keeping_attributes


class Keeps(nn.Module):
    """A model that keeps tensors of its first call in a dict, a list and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))
        self.inner = nn.Linear(4, 4)
        self.tables: dict[str, torch.Tensor] = {}
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "bias" not in self.tables:
            self.tables["bias"] = self.bias * 2
        self.last = x
        self.seen.append(x)
        self.called = True
        return (self.inner(x) + self.tables["bias"]).square().sum()


def test_a_model_that_keeps_tensors_is_traced_and_left_as_it_was() -> None:
    """A kept tensor's gradient is in the program, the model's containers are as before, and the model can still be
    called."""
    model, x = Keeps(), torch.randn(2, 4)
    program = trace(model, (x,), {})
    assert {slot.name for slot in program.outputs} >= {"bias", "inner.weight"}
    assert (model.tables, model.seen, hasattr(model, "last")) == ({}, [], False)
    assert model.called
    model(x).backward()
    assert model.bias.grad is not None


class KeepsDeeply(nn.Module):
    """A model that keeps tensors in a dict of tuples, a list of lists, and an object."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.seen: list[list[torch.Tensor]] = [[]]
        self.record = types.SimpleNamespace(last=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(4.0)
        cos, sin = self.tables.setdefault(len(x), (angles.cos(), angles.sin()))
        self.seen[0].append(x)
        self.record.last = self.record.new = x
        return (self.inner(x) * cos + sin).sum()


def test_tensors_within_nested_containers_are_taken_out() -> None:
    """After a trace nested containers hold no tensor of the trace, a note names the attributes, and the model
    still trains."""
    model, x = KeepsDeeply(), torch.randn(2, 4)
    program = trace(model, (x,), {})
    assert (model.tables, model.seen, vars(model.record)) == ({}, [[]], {"last": None})
    assert "keeps tensors in tables, seen, record when" in program.python.notes[0]
    model(x).backward()
    assert model.inner.weight.grad is not None


def test_tensors_are_taken_out_after_an_error() -> None:
    """After an error in a call, an attribute that the call bound, replaced or filled with tensors is as before."""
    model = Keeps()
    table, old, new = model.tables, torch.ones(1), torch.zeros(1)
    table["old"] = old
    try:
        with keeping_attributes(model):
            table["new"] = new
            model.tables = {"other": new}
            model.inner.note = [new]  # type: ignore[assignment]
            raise RuntimeError("stop")
    except RuntimeError:
        pass
    assert model.tables is table
    assert list(table) == ["old"]
    assert table["old"] is old
    assert not hasattr(model.inner, "note")


def test_a_recurrent_layers_list_of_its_parameters_is_no_kept_tensor() -> None:
    """Torch's list `_flat_weights` of named parameters is not reported as a kept tensor."""
    program = trace(nn.Sequential(nn.LSTM(4, 4)), (torch.randn(2, 3, 4),))
    assert not program.python.notes
