"""Sizes that no mesh divides, such as a prime vocabulary, seven heads and odd batches, equal one device."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autoshard
from autoshard import Mesh, P
from autoshard.ir import boundary
from autoshard.runtime import engine
from autoshard.testing import DrawnProgram, check_plan, programs
from autoshard.tracing import trace
from passes.lowering.lower_program import prepare
from tests.models import odd
from tests.passes.greedy_plans import most_uneven_plan

MESHES = [Mesh({"model": 4}), Mesh({"model": 3}), Mesh({"data": 2, "model": 2})]


@pytest.fixture(autouse=True)
def _poisoned_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad every program input with NaN, or with indices out of range, so that a read of padding shows."""

    def shard_all(tensor: torch.Tensor, *args: object) -> list[torch.Tensor]:
        if tensor.dtype is torch.bool:
            return boundary.shard_all(tensor, *args)  # type: ignore[arg-type]
        poison = math.nan if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).max
        return boundary.shard_all(tensor, *args, padding=poison)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "shard_all", shard_all)


@pytest.mark.sample(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_plan_of_uneven_splits_equals_one_device(mesh: Mesh) -> None:
    """With every value split unevenly, heads and vocabulary too, a model equals one device."""
    model, inputs = odd()
    program = trace(model, (), inputs)
    plan = most_uneven_plan(program, mesh)
    attention = next(node for node in prepare(program).graph.nodes if "autoshard.attention" in str(node.target))
    assert attention.meta["val"][0].shape[1] == 7
    assert any(plan.nodes[attention.name].inputs[0].dims)
    assert plan.parameters["transformer.wte.weight"].spec.dims
    check_plan(model, mesh, inputs, plan=plan, precise=torch.float64).raise_if_different()


@given(programs(), st.sampled_from(MESHES))
def test_uneven_plans_of_drawn_programs_equal_one_device(program: DrawnProgram, mesh: Mesh) -> None:
    """With every value split unevenly, drawn programs equal one device."""
    plan = most_uneven_plan(trace(program.model, program.inputs), mesh)
    check_plan(program.model, mesh, program.inputs, plan=plan, precise=torch.float64).raise_if_different()


@pytest.mark.parametrize("mesh", [Mesh({"model": 4}), Mesh({"model": 2})], ids=str)
def test_parameters_are_constrained_to_uneven_splits(mesh: Mesh) -> None:
    """With the tied embedding split along the vocabulary, three steps equal one device."""
    model, inputs = odd()
    constraints = {"transformer.wte.weight": P("model"), "input:*": P("model")}
    plan = autoshard.plan(model, mesh, example_inputs=inputs, constraints=constraints, precision=None)
    assert plan.parameters["transformer.wte.weight"].spec == P("model")
    check_plan(model, mesh, inputs, plan=plan, steps=3, precise=torch.float64).raise_if_different()
