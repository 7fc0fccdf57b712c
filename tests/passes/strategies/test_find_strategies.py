"""Plans on a mesh with an axis of one rank lower to programs that the verifier accepts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.ir.mesh import Mesh
from autoshard.testing import plans
from autoshard.tracing import trace
from passes.lowering.lower_program import lower_program
from passes.verification.verify_program import verify_program


class Sums(nn.Module):
    """Sums along dims that three ranks split unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(x * self.weight, 0) @ x.t()).sum()


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [{"data": 3, "model": 1}, {"data": 1, "model": 3}])
@given(data=st.data())
def test_uneven_dims_beside_an_axis_of_one(axes: dict[str, int], data: st.DataObject) -> None:
    """Drawn plans that split uneven dims over three ranks, beside an axis of one rank, lower to verified programs."""
    program = trace(Sums(), (torch.zeros(4, 8),), {})
    mesh = Mesh(axes)
    phased = lower_program(program, data.draw(plans(program, mesh)))
    verify_program(phased.lowered.traced, phased.lowered)
