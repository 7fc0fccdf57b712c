"""Predictions exist for every plan, whatever its operators."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.tracing import trace
from passes.pipeline import PlanOptions, plan_program
from tests.passes.blocks import h100s


def test_the_utilisation_of_convolutions() -> None:
    """Their cost reads which gradients are asked for, a list among the arguments."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    mesh = Mesh({"x": 2})
    plan = plan_program(trace(model, (torch.ones(4, 4, 8, 8),)), mesh, h100s(mesh), PlanOptions(with_baselines=False))
    assert plan.predicted.mfu is not None
    assert 0 < plan.predicted.mfu <= 1
