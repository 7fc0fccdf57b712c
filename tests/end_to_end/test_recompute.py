"""In little memory, values are recomputed, and training still equals one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autoshard
from autoshard import Mesh, P, Plan
from tests.end_to_end.training import assert_equal, train
from tests.models import MODELS

PAIR = Mesh({"data": 2})


def tight_plan(name: str, share: float, *, dropout: float = 0.0, **asked: object) -> Plan:
    """Return a plan with recomputation, in a share of the memory that the fastest plan needs."""
    model, inputs = MODELS[name](dropout=dropout)
    options = {"precision": None, **asked}
    fastest = autoshard.plan(model, PAIR, example_inputs=inputs, **options)
    budget = int(share * fastest.predicted.peak_memory_bytes)
    plan = autoshard.plan(model, PAIR, example_inputs=inputs, memory_budget=budget, **options)
    assert plan.predicted.peak_memory_bytes <= budget
    assert plan.recompute.nodes
    return plan


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_training_equals_one_device(name: str) -> None:
    """With recomputation, loss, gradients, and parameters after three steps of AdamW equal one device."""
    plan = tight_plan(name, 0.7)
    model, inputs = MODELS[name]()
    expected = train(MODELS[name]()[0], inputs)
    assert_equal(train(autoshard.compile(model, PAIR, plan=plan, example_inputs=inputs), inputs), expected)


@pytest.mark.slow
def test_dropout_draws_the_same_mask_again() -> None:
    """With recomputed dropout, training equals a mesh of one rank, which keeps its masks."""
    plan = tight_plan("gpt2", 0.55, dropout=0.2)
    assert any("dropout" in node.name or "attention" in node.name for node in plan.recompute.nodes)
    trainings = []
    for mesh, chosen in ((PAIR, plan), (Mesh({"data": 1}), None)):
        model, inputs = MODELS["gpt2"](dropout=0.2)
        sharded = autoshard.compile(model, mesh, plan=chosen, example_inputs=inputs)
        torch.manual_seed(7)
        trainings.append(train(sharded, inputs))
    assert_equal(*trainings)


def test_constraints_hold_and_a_plan_is_saved(tmp_path: Path) -> None:
    """A plan with recomputation keeps its constraints, states its recomputed nodes, and runs after it is loaded."""
    plan = tight_plan("gpt2", 0.85, constraints={"input:*": P("data"), "*.weight": P()})
    assert {item.spec for name, item in plan.parameters.items() if name.endswith(".weight")} == {P()}
    assert plan.predicted.breakdown["recompute"] > 0
    assert f"Recompute: {len(plan.recompute.nodes)} of " in str(plan)
    assert sum(map(len, plan.recomputed.values())) == len(plan.recompute.nodes)
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read.recompute == plan.recompute
    model, inputs = MODELS["gpt2"]()
    sharded = autoshard.compile(model, PAIR, plan=read, example_inputs=inputs)
    kept = set(sharded.program.phased.saved)
    free = autoshard.compile(MODELS["gpt2"]()[0], PAIR, example_inputs=inputs)
    assert kept != set(free.program.phased.saved)
