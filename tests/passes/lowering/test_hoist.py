"""Values that depend on parameters alone are computed once for all micro-batches, as far as memory allows."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import fx

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.errors import VerificationError
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.program import InputKind
from passes.lowering.hoist import Hoist
from passes.lowering.lower_program import lower_program
from passes.lowering.lowering_options import LoweringOptions
from passes.lowering.node_time import NodeTime
from passes.memory.lowered_memory import peak_bytes
from passes.memory.stage_load import StageLoad
from passes.verification.verify_phases import verify_phases
from tests.passes.families import FAMILIES
from tests.passes.hoist_mutations import hoist_what_differs
from tests.passes.layouts import MESH, phased_of, plan_of, program_of
from tests.passes.mutant_runs import run_of
from tests.passes.mutants import Place
from tests.passes.mutations import copy_of

LLAMA, SHARDED = "llama", "ZeRO-3"
TIME = NodeTime(MESH, None)
ROOMY = 1e12


def alone(family: str, layout: str) -> PhasedProgram:
    """A step in which each micro-batch computes all its values itself."""
    return lower_program(program_of(family, layout), plan_of(family, layout))


def gathers(phase: fx.GraphModule | None) -> list[fx.Node]:
    nodes = () if phase is None else phase.graph.nodes
    return [node for node in nodes if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default]


def gathered(phase: fx.GraphModule | None) -> int:
    """Count the gathered values, alone or in buckets."""
    sent = [node.all_input_nodes[0] for node in gathers(phase)]
    return sum(len(item.all_input_nodes) if item.target is torch.ops.aten.cat.default else 1 for item in sent)


def held(phased: PhasedProgram) -> int:
    """How many values are held for all micro-batches."""
    return 0 if phased.hoisted is None else len(phased.hoisted.graph.output_node().args[0])  # type: ignore[arg-type]


def sources(node: fx.Node) -> set[fx.Node]:
    """Return the placeholders on which a value depends."""
    return {node} if node.op == "placeholder" else set().union(*map(sources, node.all_input_nodes))


def test_weights_are_gathered_once() -> None:
    """Gathers of weights move to the hoisted phase. The remaining gathers of the forward all depend on the batch."""
    before, after = alone(LLAMA, SHARDED), phased_of(LLAMA, SHARDED)
    verify_phases(after)
    slots = after.lowered.inputs
    assert {slots[index].slot.kind for index in after.hoisted_inputs} <= {InputKind.PARAMETER, InputKind.BUFFER}
    once, left, whole = (
        sum(gathered(phase) for phase in phases)
        for phases in ([after.hoisted], [after.forward, after.backward], [before.forward, before.backward])
    )
    assert once >= 9  # a Llama of one layer has so many matrices
    assert once + left <= whole
    placeholders = after.forward.graph.find_nodes(op="placeholder")
    kinds = [slots[index].slot.kind for index in after.forward_inputs]
    of_batch = {node for node, kind in zip(placeholders, kinds, strict=False) if kind is InputKind.INPUT}
    assert all(sources(node) & of_batch for node in gathers(after.forward))


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["ZeRO-3", "mixed precision", "offloaded"])
def test_numbers_keep_their_bits(layout: str) -> None:
    """On every rank, a step of two micro-batches has the same bits with hoisted values as without."""
    traced, shared = program_of(LLAMA, layout), phased_of(LLAMA, layout)
    assert held(shared) > 0
    run = run_of(alone(LLAMA, layout), FAMILIES[LLAMA]()[1])
    found, expected = (run.numbers(Place.PHASES, item, traced) for item in (shared, run.phased))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_as_much_is_held_as_fits() -> None:
    """More memory holds more values for all micro-batches, within the limit. A limit without room changes nothing."""
    phased = alone(LLAMA, SHARDED)
    least, most = (peak_bytes(item, micro_batches=2) for item in (phased, Hoist(2, TIME, ROOMY)(phased)))
    counts = []
    for share in (0.0, 0.3, 0.6, 1.0):
        made = Hoist(2, TIME, least + share * (most - least))(phased)
        verify_phases(made)
        assert peak_bytes(made, micro_batches=2) <= least + share * (most - least)
        counts.append(held(made))
    assert counts == sorted(counts)
    assert counts[0] < counts[1] < counts[-1] == held(phased_of(LLAMA, SHARDED))
    assert Hoist(2, TIME, least - 1)(phased) is phased


def test_stages_of_a_rank_share_its_memory() -> None:
    """If other stages and micro-batches in flight take memory of the rank, fewer values are held, within the limit."""
    phased, load = alone(LLAMA, SHARDED), StageLoad(stages=3, in_flight=5)
    least, most = (peak_bytes(item, 2, load) for item in (phased, Hoist(2, TIME, ROOMY)(phased)))
    limit = (least + most) / 2
    made, roomy = Hoist(2, TIME, limit, load)(phased), Hoist(2, TIME, limit)(phased)
    assert peak_bytes(made, 2, load) <= limit < peak_bytes(roomy, 2, load)
    assert 0 < held(made) < held(roomy)


def test_without_a_limit_the_peak_stays() -> None:
    """Without a memory limit, held values do not raise the peak memory of the step."""
    phased = alone(LLAMA, SHARDED)
    made = Hoist(4, TIME)(phased)
    assert peak_bytes(made, micro_batches=4) <= peak_bytes(phased, micro_batches=4)


@pytest.mark.slow
def test_one_micro_batch_shares_with_none() -> None:
    """The pass returns a step of one micro-batch unchanged, and hoists nothing from a call without an optimizer."""
    phased = alone(LLAMA, SHARDED)
    assert Hoist(1, TIME, ROOMY)(phased) is phased
    assert Hoist(4, TIME, ROOMY)(alone(LLAMA, "tensor")).hoisted is None


def test_what_differs_between_micro_batches_is_refused() -> None:
    """A hoisted call that reads the batch is refused."""
    found = hoist_what_differs(phased_of(LLAMA, SHARDED), Random(0))
    assert found is not None
    with pytest.raises(VerificationError, match=r"the hoisted program reads input 'input:.', which may differ between"):
        verify_phases(found[1])


def test_another_call_is_refused() -> None:
    """A hoisted phase is refused if one of its calls is changed to another operator."""
    program, plan = program_of(LLAMA, SHARDED), plan_of(LLAMA, SHARDED)
    phased = lower_program(program, plan, options=LoweringOptions(micro_batches=2, with_overlap=False))
    assert phased.hoisted is not None
    calls = [node.name for node in phased.hoisted.graph.nodes if node.op == "call_function" and node.all_input_nodes]
    for name in calls[:: max(1, len(calls) // 20)]:
        changed = copy_of(phased.hoisted)
        next(node for node in changed.graph.nodes if node.name == name).target = torch.ops.aten.neg.default
        with pytest.raises(VerificationError, match=r"of the hoisted program.* is no call of the whole program"):
            verify_phases(replace(phased, hoisted=changed))
