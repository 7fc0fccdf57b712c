"""A model planned without its inner blocks is predicted as its whole program is, buckets and overlap included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autoshard import tracing
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.spec import P
from cost_models.hardware import Cluster, node_type
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from tests.passes.deep import adamw

CPUS = node_type("cpu_laptop")
CLUSTERS = {
    "one node": Cluster("h100_sxm"),
    "two nodes": Cluster("h100_sxm", nodes=2),
    "CPUs": Cluster(CPUS, devices_per_node=4),
    "CPUs of two hosts": Cluster(CPUS.with_network("ethernet_1g"), nodes=2, devices_per_node=2),
}


class Block(nn.Module):
    """An inner part of a perceptron, with dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks that are alike between two layers, and the mean of the squares of what comes out."""

    def __init__(self, depth: int, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def programs(depth: int, width: int, rows: int, dropout: float = 0.0) -> tuple[Program, Program]:
    """The training step without inner blocks, and with all."""
    with torch.device("meta"):
        model, x = Stack(depth, width, dropout), torch.empty(rows, width)
    elided = tracing.elide_blocks(model, 1, least=1)
    assert elided is not None
    short, whole = (tracing.trace(each, (x,), {}, update=adamw(model)) for each in (elided.model, model))
    return replace(short, repeats=elided.repeats), whole


def plans(
    folded: Program, whole: Program, cluster: Cluster, parameters: P, micro_batches: int = 1
) -> tuple[Plan, Plan]:
    """The plans of both with parameters as they are asked for."""
    constraints = {"input:*": P("data"), "blocks.*.weight": parameters}
    options = PlanOptions(memory_budget=2.0**36, constraints=constraints, micro_batches=micro_batches)
    mesh = Mesh({"data": cluster.size})
    return plan_program(folded, mesh, cluster, options), plan_program(whole, mesh, cluster, options)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("where", "parameters", "micro_batches"),
    [
        ("two nodes", P(), 1),
        ("two nodes", P(), 4),
        ("two nodes", P("data"), 1),
        ("CPUs", P(), 1),
        ("CPUs of two hosts", P(), 1),
    ],
)
def test_what_is_folded_is_predicted_as_the_whole(where: str, parameters: P, micro_batches: int) -> None:
    """To 3 %: gradients of many small parameters share the latency of a bucket."""
    rows = 2048 if where.startswith("CPUs") else 65536
    folded, whole = plans(*programs(8, 512, rows), CLUSTERS[where], parameters, micro_batches)
    assert folded.repeats
    assert folded.predicted.step_time_s == pytest.approx(whole.predicted.step_time_s, rel=0.03)


def test_blocks_with_dropout_are_alike() -> None:
    """Each draws other numbers, and all lie and cost the same."""
    folded, whole = plans(*programs(6, 512, 65536, dropout=0.1), CLUSTERS["one node"], P())
    assert folded.repeats
    assert folded.objective == pytest.approx(whole.objective, rel=1e-6)
