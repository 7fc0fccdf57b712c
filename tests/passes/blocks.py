"""Small models and programs that the tests of passes share."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.testing.programs import DrawnProgram
from autoshard.tracing import trace
from cost_models.hardware import Cluster
from passes.driver.plan_and_lower import planning_problem
from passes.driver.plan_of_choice import peak_under
from passes.driver.plan_options import PlanOptions
from passes.planning.build_assignment import PlanningProblem
from tests import models

peak_of = peak_under(PlanOptions())
"""Returns the peak memory of a choice in bytes, counted on the choice's lowered program."""


Block, Blocks = partial(models.Residual, bias=False), partial(models.Blocks, bias=False)


class Perceptron(nn.Module):
    """Two biased linear layers and a squared error: small enough for exhaustive search of its plans."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.second(torch.relu(self.first(x))) - y).square().mean()


def blocks_program(*, batch: int = 8, length: int = 16, hidden: int = 16, count: int = 2) -> Program:
    """The joint program of `Blocks` on the meta device, in bfloat16."""
    with torch.device("meta"):
        model = Blocks(hidden, count).bfloat16()
        x = torch.zeros(batch, length, hidden, dtype=torch.bfloat16)
    return trace(model, (x,), {})


def perceptron_program(batch: int = 8) -> Program:
    """The joint program of `Perceptron` on the meta device, in float32."""
    with torch.device("meta"):
        return trace(Perceptron(), (torch.zeros(batch, 16), torch.zeros(batch, 16)), {})


def h100s(mesh: Mesh) -> Cluster:
    """One node with as many H100s as the mesh has ranks."""
    return Cluster("h100_sxm", devices_per_node=mesh.size)


def two_nodes(mesh: Mesh) -> Cluster:
    """Two nodes of H100s. The first axis of the mesh, of size two, runs over the slower links between the nodes."""
    return Cluster("h100_sxm", nodes=2, devices_per_node=mesh.size // 2)


def problem_of(program: Program, mesh: Mesh, cluster: Cluster | None = None, **options: object) -> PlanningProblem:
    """The planning problem of a program under fields of `PlanOptions`, by default on one node of H100s."""
    return planning_problem(program, mesh, cluster or h100s(mesh), PlanOptions(**options))  # type: ignore[arg-type]


def problem_of_drawn(drawn: DrawnProgram, mesh: Mesh, cluster: Cluster | None = None) -> PlanningProblem:
    """The planning problem of a drawn program, traced as a whole step if `drawn.whole_step` is set."""
    step = drawn.whole_step
    if step is None:
        return problem_of(trace(drawn.model, drawn.inputs), mesh, cluster)
    inputs, _ = step.cut(drawn.inputs, {})[0]
    program = trace(drawn.model, inputs, update=step.update(drawn.model))
    return problem_of(program, mesh, cluster, micro_batches=step.micro_batches)
