"""Restrictions of strategies to the role that an axis has in a recipe or a question."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.ir.recipe import Recipe
from autoshard.ir.spec import P
from autoshard.tracing import trace
from passes.driver.plan_and_lower import planning_problem
from passes.driver.plan_options import PlanOptions
from passes.planning.restrictions import ROLES, Experts, matrices, restrict, roles_of
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
    """Biases and the weights of norms count as matrices only in a model without a matrix."""
    program = trace(Squares(layer), (torch.randn(2, 4),))
    planning = planning_problem(program, MESH, h100s(MESH), PlanOptions())
    assert [slot.name for slot in matrices(planning)] == names


@pytest.mark.parametrize(
    ("recipe", "restricted"),
    [
        (Recipe(schedule="ZBVZeroBubble", virtual_stages=2, micro_batch=1, recompute="full"), set()),
        (Recipe(zero=3), {"replica", "data"}),
        (Recipe(data=4), {"replica", "data"}),
        (Recipe(expert=2), {"expert"}),
        (Recipe(context=2), {"context"}),
        (Recipe(tensor=2), {"model"}),
        (Recipe(sequence_parallel=True), {"model"}),
    ],
)
def test_an_axis_is_restricted_where_one_of_its_fields_is_given(recipe: Recipe, restricted: set[str]) -> None:
    """A given field of a recipe restricts the axes of this field, and all other axes stay free."""
    axes = dict.fromkeys(("pipeline", "replica", "data", "expert", "context", "model", "mine"), 2)
    recipe = replace(recipe, data=8) if recipe.data else recipe
    assert set(roles_of(recipe, Mesh(axes))) == restricted


def test_experts_are_free_where_their_fields_are() -> None:
    """A recipe without `expert` and `expert_tensor` leaves experts free. With both fields at 1, experts are whole."""
    roles = roles_of(Recipe(zero=1, tensor=2), Mesh({"data": 2, "model": 2}))
    assert {role.experts for role in roles.values()} == {Experts.FREE}
    assert Experts.FREE.is_split is None
    roles = roles_of(Recipe(zero=1, tensor=2, expert=1, expert_tensor=1), Mesh({"data": 2, "model": 2}))
    assert {axis: role.experts for axis, role in roles.items()} == {"data": None, "model": Experts.WHOLE}


class ClassToken(nn.Module):
    """A learned row in front of the rows of each example, as in vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)


@pytest.mark.parametrize("role", ["data", "fsdp"])
def test_a_parameter_that_is_repeated_for_each_example_is_split_with_them(role: str) -> None:
    """In data parallelism and FSDP, copies of a parameter, one for each example, may be split over the batch."""
    program = trace(Squares(ClassToken()), (torch.randn(4, 3, 4),))
    planning = planning_problem(program, MESH, h100s(MESH), PlanOptions())
    masks = restrict(planning, ROLES[role], "data")
    assert masks is not None
    variable, strategies = planning.classes["cat"], planning.space.sites["cat"].strategies
    kept = [strategy for strategy, is_kept in zip(strategies, masks[variable], strict=True) if is_kept]
    assert any(strategy.inputs == (P("data"), P("data")) for strategy in kept)
