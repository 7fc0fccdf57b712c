"""Restrictions behind the roles of axes and the questions about them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P
from autoshard.tracing import trace
from passes.driver.plan_and_lower import planning_problem
from passes.driver.plan_options import PlanOptions
from passes.planning.restrictions import ROLES, matrices, restrict
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


class ClassToken(nn.Module):
    """A learned row before the rows of each example, as vision transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)


@pytest.mark.parametrize("role", ["data", "fsdp"])
def test_a_parameter_that_is_repeated_for_each_example_is_split_with_them(role: str) -> None:
    """The repeated row is computed from the parameter: the parameter is whole where it is used, its copies are not."""
    program = trace(Squares(ClassToken()), (torch.randn(4, 3, 4),))
    planning = planning_problem(program, MESH, h100s(MESH), PlanOptions())
    masks = restrict(planning, ROLES[role], "data")
    assert masks is not None
    variable, strategies = planning.classes["cat"], planning.space.sites["cat"].strategies
    kept = [strategy for strategy, is_kept in zip(strategies, masks[variable], strict=True) if is_kept]
    assert any(strategy.inputs == (P("data"), P("data")) for strategy in kept)
