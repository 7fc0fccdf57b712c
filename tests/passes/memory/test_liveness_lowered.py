"""The planner's values in memory are those of the lowered program, found by walking through it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autoshard import Mesh, P, tracing
from autoshard.ir.program import InputKind, Program
from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.traced_optimizer import describe_update, names_of
from autoshard.testing.plans import plans
from autoshard.testing.programs import programs
from cost_models.hardware import Cluster
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program
from passes.memory.lowered_memory import peak_bytes
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


class Tagger(nn.Module):
    """Blocks and a head; returns loss and logits, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(32), Block(32))
        self.head = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.blocks(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def tagger(*, trained: bool, rows: int = 8, length: int = 16) -> Program:
    """Its program, with the update of AdamW or without."""
    model, inputs = Tagger(), (torch.randn(rows, length, 32), torch.randint(64, (rows, length)))
    optimizer = torch.optim.AdamW(model.parameters())
    update = describe_update(optimizer, names_of(model.named_parameters()), 1.0) if trained else None
    return tracing.trace(model, inputs, {}, update=update)


PROGRAMS = {trained: tagger(trained=trained) for trained in (False, True)}


def laptop(mesh: Mesh) -> Cluster:
    return Cluster("cpu_laptop", nodes=1, devices_per_node=mesh.size)


def counts(
    program: Program, mesh: Mesh, constraints: dict[str, PartitionSpec], micro_batches: int = 1
) -> tuple[int, int]:
    """Predicted peak and that of the lowered program."""
    options = PlanOptions(constraints=constraints, with_baselines=False, micro_batches=micro_batches)
    plan = plan_program(program, mesh, laptop(mesh), options)
    lowered = peak_bytes(lower_program(program, plan, laptop(mesh)), micro_batches)
    return plan.predicted.peak_memory_bytes, lowered


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_experts_are_counted_to_the_byte(name: str, trained: bool) -> None:
    """Forward and backward, and whole steps, on two ranks."""
    constraints = {key: spec for key, spec in LAYOUTS[name].items() if trained or not key.startswith("exp_avg")}
    predicted, lowered = counts(PROGRAMS[trained], Mesh({"x": 2}), constraints)
    assert predicted == lowered


@pytest.mark.parametrize(
    "constraints", [{"output:1": P("x"), **DATA}, {"output:*": P(), **DATA}, {"input:*": P(("x", "y"))}]
)
def test_two_axes_and_results_that_stay_split(constraints: dict[str, PartitionSpec]) -> None:
    """Reshards of several steps, and outputs that the user asked for split, or whole."""
    predicted, lowered = counts(PROGRAMS[False], Mesh({"x": 2, "y": 2}), constraints)
    assert predicted == pytest.approx(lowered, rel=1e-3)


def test_micro_batches_hold_the_sums_of_gradients() -> None:
    """Several micro-batches need at most two sets of gradients more than one micro-batch."""
    mesh, constraints = Mesh({"x": 2}), LAYOUTS["fully sharded"]
    one, _ = counts(PROGRAMS[True], mesh, constraints)
    predicted, lowered = counts(PROGRAMS[True], mesh, constraints, micro_batches=4)
    parameters = sum(value.numel() * 4 for value in Tagger().parameters())
    assert predicted == lowered
    assert one < predicted <= one + 2 * parameters


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_added_where_they_lie(name: str) -> None:
    """Several micro-batches take the bytes of their gradients' sums more, if gradients are most of the memory."""
    program, mesh = tagger(trained=True, rows=2, length=1), Mesh({"x": 2})
    one, _ = counts(program, mesh, LAYOUTS[name])
    predicted, lowered = counts(program, mesh, LAYOUTS[name], micro_batches=4)
    assert predicted == lowered
    assert one < predicted <= one + sum(value.numel() * 4 for value in Tagger().parameters())


@settings(max_examples=5)
@given(st.data())
def test_drawn_plans_take_no_more_than_is_counted(data: st.DataObject) -> None:
    """Nor less than what is held. A drawn plan reshards everywhere, where the count adds what may be there."""
    drawn = data.draw(programs(max_blocks=2, uneven=False))
    mesh = data.draw(st.sampled_from([Mesh({"x": 2}), Mesh({"x": 2, "y": 2})]))
    program = tracing.trace(drawn.model, drawn.inputs)
    plan = data.draw(plans(program, mesh))
    lowered = peak_bytes(lower_program(program, plan, laptop(mesh)))
    held = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.INPUT)
    nodes = program.nodes_by_name()
    values = [(nodes[slot.node].meta["val"], slot.node) for slot in program.inputs if slot.kind in held]
    least = sum(
        torch.Size(plan.nodes[name].outputs[0].local_shape(value.shape, mesh)).numel() * value.element_size()
        for value, name in values
    )
    assert least <= lowered <= plan.predicted.peak_memory_bytes
