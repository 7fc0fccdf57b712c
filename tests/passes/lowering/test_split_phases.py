"""The program of a whole step is cut into three phases, and wrong cuts are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from random import Random

import pytest
import torch

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.errors import VerificationError
from autoshard.ir.boundary import shard_all
from autoshard.ir.lowered import LoweredProgram, PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import InputKind
from autoshard.ir.spec import P
from autoshard.ir.update import Update, UpdateGroup, UpdateRule
from autoshard.kernels.optimizers import ADAM_HYPER
from autoshard.tracing import trace
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_program import verify_program
from tests.passes.blocks import Perceptron, h100s
from tests.passes.mutations import MUTATIONS, Mutation, changes_numbers, copy_of, tried

MESH = Mesh({"data": 2, "model": 2})
ADAM = UpdateRule("adam_update", ("exp_avg", "exp_avg_sq"), (True, False), ADAM_HYPER)
HYPER = torch.tensor([0.05, 0.9, 0.99, 1e-8, 0.1, 2.0], dtype=torch.float64)
LAYOUTS = {
    "ZeRO-1": {"*.weight": P(), "*:*.weight": P("data", "model"), "input:*": P("data")},
    "ZeRO-3": {"*.weight": P("data"), "*:*.weight": P("data"), "*.bias": P("model"), "input:*": P("data")},
}
SEEDS = 3
NOWHERE = ("double_collective", "change_reduction")
"""Mutations for which these programs have no place."""


@cache
def phased(layout: str = "ZeRO-1") -> PhasedProgram:
    torch.manual_seed(0)
    model = Perceptron()
    update = Update("AdamW", (UpdateGroup(ADAM, tuple(name for name, _ in model.named_parameters())),), 1.0)
    program = trace(model, (torch.randn(8, 16), torch.randn(8, 16)), update=update)
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions(constraints=LAYOUTS[layout], with_baselines=False))
    return lower_program(program, plan, h100s(MESH))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_cut_in_three(layout: str) -> None:
    """The backward hands four gradients to the update, which takes parameters, Adam state and hyper-parameters.

    The update returns the new parameters, the new state and the gradient norm.
    """
    found = phased(layout)
    verify_program(found.lowered.traced, found.lowered)
    verify_phases(found)
    kinds = [found.lowered.inputs[index].slot.kind for index in found.update_inputs]
    counts = {kind: kinds.count(kind) for kind in (InputKind.PARAMETER, InputKind.STATE, InputKind.HYPER)}
    assert counts == {InputKind.PARAMETER: 4, InputKind.STATE: 8, InputKind.HYPER: 1}
    assert len(kinds) == 13
    assert len(found.update_outputs) == 13
    assert len(found.carried) == 4
    assert not found.backward_outputs


def test_carried_values_in_another_order_are_refused() -> None:
    """A backward that returns two of its gradients in exchanged order is refused."""
    module = copy_of(phased().backward)
    output = module.graph.output_node()
    results = list(output.args[0])
    results[0], results[1] = results[1], results[0]
    output.args = (tuple(results),)
    with pytest.raises(VerificationError, match="in order"):
        verify_phases(dataclasses.replace(phased(), backward=module))


def test_a_call_that_the_step_does_not_make_is_refused_in_the_update() -> None:
    """The update is refused if any of its calls with an operand is changed to another operator."""
    module = phased().update
    assert module is not None
    calls = [node.name for node in module.graph.nodes if node.op == "call_function" and node.all_input_nodes]
    for name in calls:
        changed = copy_of(module)
        next(node for node in changed.graph.nodes if node.name == name).target = torch.ops.aten.neg.default
        with pytest.raises(VerificationError, match="is no call of the whole program"):
            verify_phases(dataclasses.replace(phased(), update=changed))


def test_a_missing_update_is_refused() -> None:
    """A step without its update is refused, and so is an update whose results are in another order."""
    with pytest.raises(VerificationError, match="13 updates, not None"):
        verify_phases(dataclasses.replace(phased(), update=None))
    with pytest.raises(VerificationError, match="update_outputs"):
        verify_phases(dataclasses.replace(phased(), update_outputs=phased().update_outputs[::-1]))


def test_what_is_updated_lies_like_what_it_updates() -> None:
    """An updated parameter with another spec than the parameter is refused."""
    lowered = phased().lowered
    index = next(i for i, slot in enumerate(lowered.outputs) if slot.slot.name == "first.weight")
    outputs = list(lowered.outputs)
    outputs[index] = dataclasses.replace(outputs[index], spec=P("data"))
    with pytest.raises(VerificationError, match=r"parameter_update 'first.weight' is promised as P\('data'\)"):
        verify_program(lowered.traced, dataclasses.replace(lowered, outputs=tuple(outputs)))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mutations_of_a_step_that_change_numbers_are_refused(mutation: Mutation) -> None:
    """Mutations of collectives, offsets, scales and operands in any phase are refused if they change numbers."""
    made = 0
    for layout in LAYOUTS:
        lowered = phased(layout).lowered
        for seed in range(SEEDS):
            module = copy_of(lowered.graph_module)
            what = tried(mutation, module.graph, Random(f"{layout} {seed}"), MESH)
            if what is None:
                continue
            made += 1
            try:
                verify_program(lowered.traced, dataclasses.replace(lowered, graph_module=module))
            except VerificationError:
                continue
            changes = changes_numbers(lowered, module, _inputs(lowered), rtol=1e-5, atol=1e-7)
            assert not changes, f"{layout}, seed {seed}: {what}"
    assert bool(made) == (mutation.__name__ not in NOWHERE)


def _inputs(program: LoweredProgram) -> list[Sequence[torch.Tensor]]:
    """Return values for all placeholders, by rank; optimizer state is not negative."""
    numbers = torch.Generator().manual_seed(5)
    found = []
    for slot in program.inputs:
        value = torch.randn(slot.shape, generator=numbers, dtype=slot.dtype)
        value = value.abs() if slot.slot.kind == InputKind.STATE else value
        found.append(shard_all(HYPER if slot.slot.kind == InputKind.HYPER else value, slot.spec, program.mesh))
    return found
