"""Forward and backward programs are accepted only as the two halves of their joint program."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch import fx

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.errors import VerificationError
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P
from autoshard.tracing import trace
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program
from passes.verification.verify_phases import verify_phases
from tests.passes.blocks import Perceptron, h100s
from tests.passes.mutations import copy_of

MESH = Mesh({"data": 2, "model": 2})


@cache
def phased() -> PhasedProgram:
    torch.manual_seed(0)
    program = trace(Perceptron(), (torch.randn(8, 16), torch.randn(8, 16)), {})
    constraints = {"*.weight": P("data", "model"), "input:*": P("data")}
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions(constraints=constraints, with_baselines=False))
    return lower_program(program, plan, h100s(MESH))


def with_results(graph_module: fx.GraphModule, order: list[int]) -> fx.GraphModule:
    """The program with its results in another order."""
    module = copy_of(graph_module)
    output = next(iter(reversed(module.graph.nodes)))
    output.args = (tuple(output.args[0][index] for index in order),)
    return module


def test_phases_of_a_lowered_program_are_accepted() -> None:
    """The phases that lowering makes are accepted as the phases of the joint program."""
    verify_phases(phased())


def test_saved_values_in_another_order_are_refused() -> None:
    """A forward that returns two saved values in each other's place is refused."""
    count = len(phased().forward_outputs)
    total = count + len(phased().saved)
    assert total - count >= 2
    for index in range(count, total - 1):
        order = list(range(total))
        order[index], order[index + 1] = order[index + 1], order[index]
        with pytest.raises(VerificationError):
            verify_phases(dataclasses.replace(phased(), forward=with_results(phased().forward, order)))


def test_a_missing_saved_value_is_refused() -> None:
    """A forward that does not return the last saved value is refused."""
    total = len(phased().forward_outputs) + len(phased().saved)
    with pytest.raises(VerificationError, match="in order"):
        verify_phases(dataclasses.replace(phased(), forward=with_results(phased().forward, list(range(total - 1)))))


def test_results_in_another_order_are_refused() -> None:
    """A backward that returns gradients in the opposite order is refused."""
    order = list(range(len(phased().backward_outputs)))[::-1]
    with pytest.raises(VerificationError, match="is returned where the joint program returns another value"):
        verify_phases(dataclasses.replace(phased(), backward=with_results(phased().backward, order)))


def test_inputs_of_the_wrong_phase_are_refused() -> None:
    """Forward inputs that are listed in the opposite order are refused."""
    inputs = phased().forward_inputs
    with pytest.raises(VerificationError, match="forward_inputs"):
        verify_phases(dataclasses.replace(phased(), forward_inputs=inputs[::-1]))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_call_that_the_joint_program_does_not_make_is_refused(phase: str) -> None:
    """A phase is refused if any one of its calls is changed to another operator."""
    module: fx.GraphModule = getattr(phased(), phase)
    calls = [node.name for node in module.graph.nodes if node.op == "call_function" and node.all_input_nodes]
    for name in calls:
        changed = copy_of(module)
        node = next(node for node in changed.graph.nodes if node.name == name)
        node.target = torch.ops.aten.neg.default
        with pytest.raises(VerificationError, match="is no call of the whole program"):
            verify_phases(dataclasses.replace(phased(), **{phase: changed}))
