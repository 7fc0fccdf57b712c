"""Models whose calls change their own attributes: refused if results depend on the changed attribute."""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoshard import TraceError
from autoshard.ir.program import InputKind
from autoshard.tracing import trace


class Counting(nn.Module):
    """A model that scales its input by the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x * self.calls)


class Counted(Counting):
    """A model that counts its calls, and does not compute with the count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


class Prepared(Counting):
    """A model whose first call sets a number for all calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls or 3
        return self.layer(x * self.calls)


def test_a_model_that_computes_with_the_number_of_its_calls_is_refused() -> None:
    """A model that computes with its number of calls is refused by name, also in a submodule."""
    with pytest.raises(TraceError, match=r"changes 1\.calls with every call"):
        trace(nn.Sequential(nn.Linear(4, 4), Counting()), (torch.randn(2, 4),))


@pytest.mark.parametrize("model", [Counted(), Prepared()], ids=lambda model: type(model).__name__)
def test_other_attributes_may_change(model: nn.Module) -> None:
    """An attribute may change if no result depends on the attribute, or if only the first call changes it."""
    program = trace(model, (torch.randn(2, 4),))
    assert [slot.name for slot in program.inputs if slot.kind is InputKind.PARAMETER] == ["layer.weight", "layer.bias"]


class CountedInARecord(nn.Module):
    """A model that counts its calls in an object, and scales by one of the object's numbers."""

    def __init__(self, stats: Any, *, scale: str) -> None:
        super().__init__()
        self.layer, self.stats, self.scale = nn.Linear(4, 4), stats, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stats.calls += 1
        return self.layer(x * getattr(self.stats, self.scale))


class Slotted:
    """An object with slots."""

    __slots__ = ("beta", "calls")

    def __init__(self) -> None:
        self.calls, self.beta = 0, 2.0


@pytest.mark.parametrize("make", [lambda: SimpleNamespace(calls=0, beta=2.0), Slotted])
def test_counts_in_objects_are_seen(make: Callable[[], Any]) -> None:
    """A count in an object that scales the result is refused by its path. If another number scales, a guard is on that
    number alone."""
    with pytest.raises(TraceError, match=r"changes stats\.calls with every call"):
        trace(CountedInARecord(make(), scale="calls"), (torch.randn(2, 4),))
    model = CountedInARecord(SimpleNamespace(calls=0, beta=2.0), scale="beta")
    guards = trace(model, (torch.randn(2, 4),)).python.guards(model.parameters())
    model.stats.calls = 7
    assert guards.hold()
    model.stats.beta = 3.0
    assert guards.changes() == ("stats.beta",)


class Remembering(nn.Module):
    """A model whose calls compute with values that earlier calls left in a container."""

    def __init__(self, held: Any, count: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer, self.held, self.count = nn.Linear(4, 4), held, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.count(self.held))


def _append(held: Any) -> float:
    held.append(1)
    return float(len(held))


def _add(held: Any) -> float:
    held += 1
    return float(held.sum())


@pytest.mark.parametrize(
    ("held", "count"),
    [(deque(), _append), (bytearray(), _append), (array.array("i"), _append), (np.zeros(2), _add)],
    ids=lambda item: type(item).__name__,
)
def test_counts_in_arrays_are_seen(held: Any, count: Callable[[Any], float]) -> None:
    """A count that a call keeps in a deque, a bytearray, an array or a NumPy array is found."""
    with pytest.raises(TraceError, match=r"changes held with every call"):
        trace(Remembering(held, count), (torch.randn(2, 4),))
