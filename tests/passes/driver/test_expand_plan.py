"""A plan that is made without a model's inner blocks expands to a plan of all blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy
import torch
from torch import nn

import autoshard
from autoshard import AutoshardError, Mesh, P, Plan, PlanMismatchError
from tests.passes.deep import Deep, Summed, alike, batch

MESH = Mesh({"a": 2})


@pytest.fixture(scope="module")
def planned() -> tuple[Deep, Plan]:
    """A model of ten equal blocks, and its plan without inner blocks, with a constraint on one of the ten."""
    torch.manual_seed(0)
    model = alike(10)
    constraints = {"blocks.4.up.weight": P("a", None)}
    return model, autoshard.plan(
        model, MESH, example_inputs=batch(), optimizer="sgd", constraints=constraints, precision=None
    )


def test_a_plan_without_inner_blocks_names_all_parameters(planned: tuple[Deep, Plan]) -> None:
    """The plan lists the parameters and updates of all blocks.

    A constraint on one inner block holds for every block.
    """
    model, plan = planned
    assert len(plan.repeats) == 1
    assert set(plan.parameters) == {name for name, _ in model.named_parameters()}
    assert {item.spec for name, item in plan.parameters.items() if name.endswith("up.weight")} == {P("a", None)}
    assert {name for name in plan.outputs if name.startswith("parameter_update")} == {
        f"parameter_update {name}" for name, _ in model.named_parameters()
    }


def test_a_saved_plan_without_inner_blocks_compiles(planned: tuple[Deep, Plan], tmp_path: Path) -> None:
    """A loaded plan without inner blocks compiles to the whole model, whose loss equals that of one device."""
    model, plan = planned
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.repeats == plan.repeats
    x = torch.randn(8, 4, 16)
    expected = model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autoshard.compile(model, MESH, optimizer=optimizer, plan=loaded)
    torch.testing.assert_close(step(x), expected.detach())


def test_deep_models_are_searched_without_inner_blocks(planned: tuple[Deep, Plan]) -> None:
    """The plan of `compile` has the nodes of all blocks, and the objective of the plan without inner blocks."""
    model, _ = planned
    sharded = autoshard.compile(model, MESH, example_inputs=batch())
    found = autoshard.plan(model, MESH, example_inputs=batch(), precision=None)
    assert found.repeats
    assert sharded.plan is not None
    assert not sharded.plan.repeats
    assert len(sharded.plan.nodes) > len(found.nodes)
    assert sharded.plan.objective == found.objective


@pytest.mark.slow
def test_a_deep_model_recomputes_without_its_inner_blocks(planned: tuple[Deep, Plan]) -> None:
    """In little memory the plan recomputes nodes of every block and fits. Its step has the loss of one device."""
    model, _ = planned
    x = torch.randn(256, 4, 16)
    free = autoshard.plan(model, MESH, example_inputs=(x,), optimizer="sgd", precision=None)
    limit = int(0.5 * free.predicted.peak_memory_bytes)  # all that is sharded and kept takes 0.51
    tight = autoshard.plan(model, MESH, example_inputs=(x,), optimizer="sgd", precision=None, memory_budget=limit)
    assert tight.repeats
    assert tight.recompute.nodes
    assert tight.predicted.peak_memory_bytes <= limit
    assert {name.split(".")[1] for name in tight.recomputed if name} == {*map(str, range(10))}
    expected = model(x).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autoshard.compile(model, MESH, optimizer=optimizer, plan=tight, memory_budget=limit)
    torch.testing.assert_close(step(x), expected)
    ran = step.sharded.plan
    assert ran is not None
    assert not ran.repeats
    assert f"Recompute: {len(ran.recompute.nodes)} of {ran.recompute.candidates} nodes" in str(tight)


def test_formulas_count_all_blocks(planned: tuple[Deep, Plan]) -> None:
    """The parameter formula of a plan without inner blocks counts the parameters of all blocks."""
    _, plan = planned
    formula = plan.formula("parameters", fixed=("batch", "sequence"))
    assert formula.subs([(sympy.Symbol("layers"), 10)]) == sum(item.numel() for item in planned[0].parameters())


@pytest.mark.slow
def test_a_plan_of_alike_blocks_is_refused_for_others(planned: tuple[Deep, Plan]) -> None:
    """A plan of repeated blocks is refused for a model whose blocks have the same parameters but another loss."""
    _, plan = planned
    other = Summed([nn.GELU] * 10)
    with pytest.raises(PlanMismatchError):
        autoshard.compile(other, MESH, plan=plan, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))(*batch())


def test_blocks_that_end_in_the_loss_are_planned_whole() -> None:
    """A model whose blocks each add to the loss is planned with all blocks."""
    plan = autoshard.plan(Summed([nn.GELU] * 8), MESH, example_inputs=batch())
    assert not plan.repeats


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "change",
    [
        {"behind": 10**9},
        {"before": -5},
        {"period": 0},
    ],
    ids=str,
)
def test_units_that_cannot_be_are_refused(planned: tuple[Deep, Plan], change: dict[str, int]) -> None:
    """A plan file whose repeated blocks have an impossible position or number is refused with an AutoshardError."""
    model, plan = planned
    data = plan.to_json()
    data["repeats"][0].update(change)
    with pytest.raises(AutoshardError, match=r"no list of blocks .* as long as the plan says|another model"):
        autoshard.prove(model, Plan.from_json(data), example_inputs=batch(), optimizer="sgd")
