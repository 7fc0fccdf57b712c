"""Peak memory of steps of several micro-batches."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from autoshard import Mesh, P, tracing
from autoshard.ir.program import Program
from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.traced_optimizer import describe_update, names_of
from cost_models.hardware import Cluster
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from tests.passes.blocks import Block

DATA = {"input:*": P("x"), "*.weight": P(), "*.bias": P()}
LAYOUTS = {
    "copies": {"input:*": P(), "*.weight": P(), "*.bias": P()},
    "data": DATA,
    "optimizer state sharded": {**DATA, "exp_avg*:*.weight": P("x")},
    "fully sharded": {"input:*": P("x"), "*.up.weight": P("x"), "*.down.weight": P("x")},
    "tensor": {"input:*": P(), "*.up.weight": P("x"), "*.down.weight": P(None, "x")},
    "free": {},
}
WHOLE = ("copies", "data", "free")
"""Layouts with whole gradients."""


class Tagger(nn.Module):
    """Blocks and a head; returns loss and logits, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(32), Block(32))
        self.head = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.blocks(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@cache
def tagger(*, trained: bool, rows: int = 8, length: int = 16) -> Program:
    """The program of a `Tagger`, with AdamW's update if `trained`."""
    model, inputs = Tagger(), (torch.randn(rows, length, 32), torch.randint(64, (rows, length)))
    optimizer = torch.optim.AdamW(model.parameters())
    update = describe_update(optimizer, names_of(model.named_parameters()), 1.0) if trained else None
    return tracing.trace(model, inputs, {}, update=update)


def laptop(mesh: Mesh) -> Cluster:
    return Cluster("cpu_laptop", nodes=1, devices_per_node=mesh.size)


def peak(program: Program, mesh: Mesh, constraints: dict[str, PartitionSpec], micro_batches: int = 1) -> int:
    """The predicted peak memory of the fastest plan, in bytes."""
    options = PlanOptions(constraints=constraints, with_baselines=False, micro_batches=micro_batches)
    return plan_program(program, mesh, laptop(mesh), options).predicted.peak_memory_bytes


def test_micro_batches_hold_the_sums_of_gradients() -> None:
    """Several micro-batches need more memory than one, by at most the size of all gradients."""
    mesh, constraints = Mesh({"x": 2}), LAYOUTS["fully sharded"]
    one = peak(tagger(trained=True), mesh, constraints)
    several = peak(tagger(trained=True), mesh, constraints, micro_batches=4)
    parameters = sum(value.numel() * 4 for value in Tagger().parameters())
    assert one < several <= one + parameters


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_added_where_they_lie(name: str) -> None:
    """With whole gradients, four micro-batches need at most two largest gradients more than one micro-batch.

    With split parameters they need at most all gradients more.
    """
    program, mesh = tagger(trained=True, rows=2, length=1), Mesh({"x": 2})
    one = peak(program, mesh, LAYOUTS[name])
    several = peak(program, mesh, LAYOUTS[name], micro_batches=4)
    sizes = [value.numel() * 4 for value in Tagger().parameters()]
    assert one < several <= one + (2 * max(sizes) if name in WHOLE else sum(sizes))
