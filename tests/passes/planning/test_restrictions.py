"""What the roles of axes, and the questions asked about them, go by."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.tracing import trace
from passes.pipeline import PlanOptions, planning_problem
from passes.planning.restrictions import matrices
from tests.passes.blocks import h100s

MESH = Mesh({"data": 2})


class Squares(nn.Module):
    """The mean of the squares of a layer's outputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


@pytest.mark.parametrize(
    ("layer", "names"), [(nn.Linear(4, 4), ["layer.weight"]), (nn.LayerNorm(4), ["layer.weight", "layer.bias"])]
)
def test_vectors_have_a_role_only_where_there_is_no_matrix(layer: nn.Module, names: list[str]) -> None:
    """Biases and the weights of norms are too small to say how a model is split."""
    program = trace(Squares(layer), (torch.randn(2, 4),))
    planning = planning_problem(program, MESH, h100s(MESH), PlanOptions())
    assert [slot.name for slot in matrices(planning)] == names
