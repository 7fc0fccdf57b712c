"""Collectives of different purposes have different communicators."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch import fx

from autoshard.errors import VerificationError
from autoshard.ir.collectives import is_collective
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P
from autoshard.runtime.traced_optimizer import describe_update, names_of
from autoshard.tracing import trace
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program
from passes.lowering.lowering_options import LoweringOptions
from passes.preparation.rewriting import with_groups
from passes.verification.verify_phases import verify_phases
from tests.passes.blocks import Perceptron, h100s

MESH = Mesh({"data": 2, "model": 2})
WHOLE = {"*.weight": P(), "*.bias": P()}
LAYOUTS = {
    "data": {**WHOLE, "input:*": P("data")},
    "tensor": {"first.*": P("model"), "second.weight": P(None, "model"), "second.bias": P(), "input:*": P("data")},
    "ZeRO-1": {**WHOLE, "exp*:*": P("data"), "input:*": P("data")},
    "clipped": {**WHOLE, "exp*:*": P("data"), "input:*": P("data")},
    "ZeRO-3": {"*.weight": P("data"), "*.bias": P(), "input:*": P("data")},
}


def kinds_of(graph_module: fx.GraphModule | None) -> set[str]:
    """Pairs of operator and communicator, such as "all_reduce gradients".

    The communicator of the axis itself is "values".
    """
    assert graph_module is not None
    nodes = [node for node in graph_module.graph.nodes if is_collective(node)]
    names = {(str(node.target).split(".")[1], str(node.args[-1])) for node in nodes}
    return {f"{operator} {group.partition('/')[2] or 'values'}" for operator, group in names}


def purposes_of(graph_module: fx.GraphModule) -> set[str]:
    """Return the purposes of a phase's messages."""
    return {kind.split()[1] for kind in kinds_of(graph_module)}


@cache
def phased(layout: str) -> PhasedProgram:
    """Lower a perceptron with a batch too large to gather.

    The layouts "ZeRO-1" and "clipped" include AdamW's update.
    """
    with torch.device("meta"):
        model, x, y = Perceptron(), torch.zeros(2**16, 16), torch.zeros(2**16, 16)
    update = None
    if layout in ("ZeRO-1", "clipped"):
        optimizer = torch.optim.AdamW(model.parameters())
        norm = 1.0 if layout == "clipped" else None
        update = describe_update(optimizer, names_of(model.named_parameters()), max_grad_norm=norm)
    program = trace(model, (x, y), update=update)
    options = PlanOptions(constraints=LAYOUTS[layout], with_baselines=False)
    mesh = MESH if layout == "tensor" else Mesh({"data": 2})
    plan = plan_program(program, mesh, h100s(mesh), options)
    return lower_program(program, plan, h100s(mesh), LoweringOptions(with_overlap=False))


def test_gradients_of_data_parallelism_have_their_own() -> None:
    """In data parallelism, gradients are reduced by their own communicator, and the loss by that of the axis."""
    found = phased("data")
    assert purposes_of(found.forward) == {"values"}
    assert kinds_of(found.backward) == {"all_reduce gradients"}


def test_gathers_of_parameters_have_their_own() -> None:
    """Under ZeRO-3, gathers of parameters and reductions of gradients have communicators of their own."""
    found = phased("ZeRO-3")
    assert "all_gather_into_tensor parameters" in kinds_of(found.forward)
    assert "reduce_scatter_tensor gradients" in kinds_of(found.backward)
    assert purposes_of(found.backward) <= {"parameters", "gradients"}


def test_an_update_gathers_parameters() -> None:
    """Under ZeRO-1, the update gathers parameters by the communicator of parameters."""
    found = phased("ZeRO-1")
    assert kinds_of(found.update) <= {"all_gather_into_tensor parameters", "reduce_scatter_tensor gradients"}
    assert "all_gather_into_tensor parameters" in kinds_of(found.update)


def test_values_keep_the_axis_own() -> None:
    """In tensor parallelism, activations use the communicator of the axis itself, and gradients use their own."""
    found = phased("tensor")
    assert "values" in purposes_of(found.forward)
    assert kinds_of(found.backward) == {"reduce_scatter_tensor gradients", "all_reduce gradients"}


def test_a_purpose_hides_no_wrong_axis() -> None:
    """Gradients that are reduced over the wrong axis are refused, although the communicator's purpose is right."""
    found = phased("tensor")
    verify_phases(found)
    wrong = with_groups(found.backward, lambda node: str(node.args[-1]).replace("data/", "model/"))
    with pytest.raises(VerificationError):
        verify_phases(dataclasses.replace(found, backward=wrong))
