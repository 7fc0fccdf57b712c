"""A plan describes in words where parameters, gradients and optimizer state are."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.spec import P, PartitionSpec
from autoshard.ir.update import Update, UpdateGroup, UpdateRule
from autoshard.kernels.optimizers import ADAM_HYPER, SGD_HYPER
from autoshard.tracing import trace
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from tests.passes.blocks import Perceptron, h100s

MESH = Mesh({"data": 2, "model": 2})
ADAM = UpdateRule("adam_update", ("exp_avg", "exp_avg_sq"), (True, False), ADAM_HYPER)
SGD = UpdateRule("sgd_update", (), (False,), SGD_HYPER)
BATCH = {"input:*": P("data"), "*.bias": P()}


FEW, MANY = 8, 8192
"""Rows of a batch. With few rows, activations are cheaper to send than weights; with many, weights are cheaper."""


@cache
def program(rule: UpdateRule, count: int) -> Program:
    torch.manual_seed(0)
    model = Perceptron()
    update = Update("AdamW", (UpdateGroup(rule, tuple(name for name, _ in model.named_parameters())),))
    rows = torch.empty(count, 16, device="meta")
    return trace(model, (rows, rows), {}, update=update)


def planned(constraints: dict[str, PartitionSpec], rows: int, rule: UpdateRule = ADAM) -> Plan:
    options = PlanOptions(constraints={**BATCH, **constraints}, with_baselines=False)
    return plan_program(program(rule, rows), MESH, h100s(MESH), options)


@pytest.mark.parametrize(
    ("constraints", "layout"),
    [
        ({"first.weight": P(), "*:first.weight": P()}, "copied over data, model"),
        ({"first.weight": P("model"), "*:first.weight": P("model")}, "split over model; copied over data"),
        (
            {"first.weight": P("model"), "second.weight": P(None, "model"), "*:first.weight": P("model", "data")},
            "ZeRO-[12] over data; split over model",
        ),
    ],
)
def test_layouts_have_names(constraints: dict[str, PartitionSpec], layout: str) -> None:
    """The layout's name tells apart copied parameters, split parameters, and split state of a whole parameter."""
    plan = planned(constraints, FEW)
    item = plan.parameters["first.weight"]
    assert re.fullmatch(layout, item.layout)
    assert item.state["exp_avg"] == constraints["*:first.weight"]
    assert layout.startswith("ZeRO") or item.layout in plan.layouts


def test_what_the_forward_gathers_is_zero_3() -> None:
    """Parameters that are split over the axis of the batch, and gathered at their use, are named ZeRO-3."""
    plan = planned({"*.weight": P("data"), "*:*.weight": P("data")}, MANY)
    assert {plan.parameters[name].layout for name in ("first.weight", "second.weight")} == {
        "ZeRO-3 over data; copied over model"
    }
    assert plan.layouts["ZeRO-3 over data; copied over model"] == 2 * 16 * 32
    assert "layout: ZeRO-3 over data; copied over model" in str(plan)
    assert Plan.from_json(plan.to_json()).parameters == plan.parameters


def test_zero_1_and_2_differ_in_the_gradient() -> None:
    """With split state of whole parameters, a split gradient is named ZeRO-2, and a whole gradient ZeRO-1."""
    plan = planned({"*.weight": P(), "*:*.weight": P("data")}, MANY)
    for name in ("first.weight", "second.weight"):
        item = plan.parameters[name]
        is_split = item.gradient is not None and "data" in item.gradient.sharded_axes
        assert item.layout.startswith("ZeRO-2 over data" if is_split else "ZeRO-1 over data")


def test_without_state_the_update_counts() -> None:
    """A parameter without optimizer state is named ZeRO-3 if it is split and gathered at its use."""
    plan = planned({"*.weight": P("data")}, MANY, SGD)
    assert plan.parameters["first.weight"].state == {}
    assert plan.parameters["first.weight"].layout.startswith("ZeRO-3 over data")
