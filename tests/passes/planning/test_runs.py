"""The price of a step counts each call as often as it runs. Micro-batches repeat, while gradients are reduced once."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autoshard import Mesh, P, tracing
from autoshard.ir.collectives import is_collective
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.runtime.traced_optimizer import describe_update, names_of
from cost_models.streams import simulate_streams
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program
from passes.lowering.lowering_options import LoweringOptions
from passes.prediction.walk_program import ACCUMULATION, walk_program
from passes.strategies.price_nodes import NodePrices
from tests.passes.blocks import h100s

MESH, WIDTH, ROWS, PARTS = Mesh({"x": 4}), 512, 4096, 8


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@cache
def step() -> Program:
    """The training step of one micro-batch, with AdamW."""
    with torch.device("meta"):
        model, x = Loss(), torch.empty(ROWS, WIDTH)
    update = describe_update(torch.optim.AdamW(model.parameters()), names_of(model.named_parameters()), None)
    return tracing.trace(model, (x,), {}, update=update)


@cache
def plan_of(micro_batches: int) -> Plan:
    """A data-parallel plan, in which the search chooses the specs of optimizer state."""
    constraints = {"input:*": P("x"), "*weight": P(), "*bias": P()}
    options = PlanOptions(constraints=constraints, micro_batches=micro_batches, with_baselines=False)
    return plan_program(step(), MESH, h100s(MESH), options)


def collectives(micro_batches: int) -> dict[str, Counter[str]]:
    """Count the collectives of each kind in each phase, without overlap passes."""
    plan = plan_of(micro_batches)
    phased = lower_program(step(), plan, h100s(MESH), LoweringOptions(micro_batches=micro_batches, with_overlap=False))
    return {
        name: Counter(str(node.target).split(".")[1] for node in phase.graph.nodes if is_collective(node))
        for name, phase in phased.phases.items()
    }


def test_gradients_of_micro_batches_are_reduced_once() -> None:
    """A micro-batch reduces only its loss, and the update reduces the six gradients of the step."""
    found = collectives(PARTS)
    assert (found["forward"], found["backward"]) == ({"all_reduce": 1}, {})
    assert sum(number for kind, number in found["update"].items() if "reduce" in kind) == 6


@pytest.mark.parametrize("micro_batches", [1, PARTS])
def test_the_objective_is_of_the_whole_step(micro_batches: int) -> None:
    """The objective of a plan equals the simulated time of its lowered program, without overlap and hoisting."""
    plan = plan_of(micro_batches)
    phased = lower_program(step(), plan, h100s(MESH), LoweringOptions(with_overlap=False, with_native=False))
    walked = walk_program(phased, NodePrices(h100s(MESH), MESH), micro_batches=micro_batches)
    times = simulate_streams(walked.segments)
    assert (ACCUMULATION in times.compute_s) == (micro_batches > 1)
    assert times.total_s == pytest.approx(plan.objective, rel=1e-6)


def test_calls_count_as_often_as_they_run() -> None:
    """Eight micro-batches count each forward and backward call eight times, and each update call once."""
    once, often = ({(row.operator, row.source): row.calls for row in plan_of(count).operators} for count in (1, PARTS))
    repeats = {key[0]: often[key] / once[key] for key in once if key in often}
    assert repeats["aten.mm.default"] == PARTS
    assert {count for name, count in repeats.items() if "adam" in name} == {1}
