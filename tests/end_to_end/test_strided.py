"""Models that read memory by strides: what they see does not depend on where values lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh, NotAvailableError, P
from autoshard.testing import check_plan

MESH = Mesh({"model": 2})


class Windows(nn.Module):
    """Overlapping windows of a value whose dims lie in another order than its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = torch.as_strided(self.first(x).transpose(0, 1), (7, 4, 2), (2, 1, 3))
        return self.second(windows.transpose(1, 2)).pow(2).mean()


class Gaps(nn.Module):
    """Windows of every second column."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided((x * 2)[:, ::2], (6, 2), (8, 4)).sum()


@pytest.mark.parametrize("constraints", [None, {"input:0": P("model")}, {"first.weight": P("model")}], ids=str)
def test_windows_of_permuted_memory_equal_one_device(constraints: dict[str, autoshard.PartitionSpec] | None) -> None:
    """Whether the value was gathered, and so lies in another order, or computed whole."""
    torch.manual_seed(0)
    model, inputs = Windows(), (torch.randn(6, 8),)
    plan = autoshard.plan(model, MESH, example_inputs=inputs, constraints=constraints, precision=None)
    check_plan(model, MESH, inputs, plan=plan).raise_if_different()


def test_memory_with_gaps_is_refused_where_it_moves() -> None:
    """What lies in the gaps is not part of the value, so no reshard brings it along."""
    constraints = {"input:0": P("model")}
    with pytest.raises(NotAvailableError, match=r"as_strided.*reads memory by strides"):
        autoshard.compile(Gaps(), MESH, example_inputs=(torch.randn(6, 8),), constraints=constraints)
