"""Models whose calls change their own attributes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard import TraceError
from autoshard.ir.program import InputKind
from autoshard.tracing import trace


class Counting(nn.Module):
    """Each call scales by the number of calls so far."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x * self.calls)


class Counted(Counting):
    """Calls are counted and nothing is computed with their number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


class Prepared(Counting):
    """The first call sets what all compute with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls or 3
        return self.layer(x * self.calls)


def test_a_model_that_computes_with_the_number_of_its_calls_is_refused() -> None:
    """By name, within another module too."""
    with pytest.raises(TraceError, match=r"changes 1\.calls with every call"):
        trace(nn.Sequential(nn.Linear(4, 4), Counting()), (torch.randn(2, 4),))


@pytest.mark.parametrize("model", [Counted(), Prepared()], ids=lambda model: type(model).__name__)
def test_other_attributes_may_change(model: nn.Module) -> None:
    """What no result depends on, and what stays after the first call."""
    program = trace(model, (torch.randn(2, 4),))
    assert [slot.name for slot in program.inputs if slot.kind is InputKind.PARAMETER] == ["layer.weight", "layer.bias"]
