"""Lowered programs have one text for all ranks, call only local operators and collectives, and keep all results."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from autoshard.errors import NotAvailableError
from autoshard.ir.boundary import shard_all, unshard
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan_parts import NodePlan
from autoshard.ir.program import InputKind
from autoshard.ir.spec import P, PartitionSpec
from autoshard.runtime.simulator import simulate
from autoshard.tracing import trace
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program
from tests.passes.blocks import Perceptron, blocks_program, h100s

MESH = Mesh({"data": 2, "model": 2})
LAYOUTS = {
    "data parallel": {"first.weight": P(), "second.weight": P(), "input:*": P(("data", "model"))},
    "fully sharded": {
        "first.weight": P(("data", "model")), "second.weight": P(("data", "model")), "input:*": P(("data", "model")),
    },
    "tensor parallel": {
        "first.weight": P("model"), "first.bias": P("model"), "second.weight": P(None, "model"), "input:*": P(),
    },
    "mixed": {"first.weight": P("model", "data"), "second.weight": P("data", "model"), "input:*": P("data")},
}  # fmt: skip


def lowered_with(constraints: dict[str, PartitionSpec]) -> PhasedProgram:
    """The perceptron lowered under constraints, on four ranks."""
    torch.manual_seed(0)
    program = trace(Perceptron(), (torch.randn(8, 16), torch.randn(8, 16)), {})
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions(constraints=constraints, with_baselines=False))
    return lower_program(program, plan, h100s(MESH))


def collectives(phased: PhasedProgram) -> Counter[str]:
    """How often the joint program calls each collective."""
    names = (str(node.target) for node in phased.lowered.graph_module.graph.nodes)
    return Counter(name.split(".")[1] for name in names if name.startswith("_c10d_functional"))


def global_values(phased: PhasedProgram) -> list[torch.Tensor]:
    """Return drawn values for all placeholders; tangents are ones."""
    numbers = torch.Generator().manual_seed(3)
    return [
        torch.ones(slot.shape) if slot.slot.kind == InputKind.TANGENT else torch.randn(slot.shape, generator=numbers)
        for slot in phased.lowered.inputs
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_what_the_trace_computes(layout: str) -> None:
    """Loss and gradients on four simulated ranks equal the traced graph's."""
    phased = lowered_with(LAYOUTS[layout])
    values = global_values(phased)
    expected = phased.lowered.traced.graph_module(*values)
    locals_ = [shard_all(value, slot.spec, MESH) for value, slot in zip(values, phased.lowered.inputs, strict=True)]
    results = simulate(phased.lowered.graph_module, MESH, locals_)
    for result, slot, value in zip(results, phased.lowered.outputs, expected, strict=True):
        torch.testing.assert_close(unshard(result, slot.spec, MESH, slot.shape, check=True), value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_phases_compute_what_the_joint_program_computes(layout: str) -> None:
    """The forward, then the backward from the saved values, equals the joint program bit for bit."""
    phased = lowered_with(LAYOUTS[layout])
    values = global_values(phased)
    locals_ = [shard_all(value, slot.spec, MESH) for value, slot in zip(values, phased.lowered.inputs, strict=True)]
    joint = simulate(phased.lowered.graph_module, MESH, locals_)
    forward = simulate(phased.forward, MESH, [locals_[index] for index in phased.forward_inputs])
    count = len(phased.forward_outputs)
    backward = simulate(phased.backward, MESH, [*forward[count:], *(locals_[i] for i in phased.backward_inputs)])
    for index, result in [
        *zip(phased.forward_outputs, forward[:count], strict=True),
        *zip(phased.backward_outputs, backward, strict=True),
    ]:
        assert all(torch.equal(a, b) for a, b in zip(result, joint[index], strict=True))


def large_lowered(weights: dict[str, PartitionSpec], batch: PartitionSpec, *, length: int = 512) -> PhasedProgram:
    """Lower two blocks of realistic size, with specs for their weights and the batch."""
    program = blocks_program(batch=64, length=length, hidden=1024)
    constraints = {f"blocks.*.{name}.weight": spec for name, spec in weights.items()} | {"input:0": batch}
    plan = plan_program(program, MESH, h100s(MESH), PlanOptions(constraints=constraints, with_baselines=False))
    return lower_program(program, plan, h100s(MESH))


def gathered_weights(phased: PhasedProgram) -> list[str]:
    """Names of the weights that are all-gathered."""
    nodes = [n for n in phased.lowered.graph_module.graph.nodes if "all_gather" in str(n.target)]
    return sorted({source for node in nodes if "weight" in (source := str(node.meta["global"]))})


def test_data_parallel_only_reduces() -> None:
    """Data parallelism gathers no weight and has no all-to-all."""
    phased = large_lowered({"up": P(), "down": P(), "norm": P()}, P(("data", "model")))
    assert not gathered_weights(phased)
    assert "all_to_all_single" not in collectives(phased)


def test_tensor_parallel_moves_no_weight() -> None:
    """Tensor parallelism gathers no weight."""
    phased = large_lowered({"up": P("model"), "down": P(None, "model"), "norm": P()}, P("data"), length=1)
    assert not gathered_weights(phased)


def test_fully_sharded_gathers_weights_and_scatters_gradients() -> None:
    """Fully sharded data parallelism gathers weights, and reduce-scatters each of four gradients over both axes."""
    both = ("data", "model")
    phased = large_lowered({"up": P(both), "down": P(None, both), "norm": P()}, P(both))
    assert gathered_weights(phased)
    assert collectives(phased)["reduce_scatter_tensor"] >= 4 * 2


class Strided(torch.nn.Module):
    """Reads every second column of a product by strides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided((self.weight * x)[:, ::2], (8, 2), (8, 4)).square().sum()


def test_reads_by_strides_are_refused_where_a_reshard_changed_the_memory() -> None:
    """`as_strided` of a value that a reshard copied to another memory layout is refused.

    Without a reshard it lowers.
    """
    program = trace(Strided(), (torch.randn(8, 8),), {}, grad=False)
    whole = plan_program(program, MESH, h100s(MESH), PlanOptions(constraints={"weight": P(), "input:0": P()}))
    assert lower_program(program, whole).forward is not None
    node = next(name for name in whole.nodes if name.startswith("slice"))
    split = NodePlan((P("data"),), (P("data"),))
    moved = dataclasses.replace(whole, nodes={**whole.nodes, node: split})
    with pytest.raises(NotAvailableError, match=r"as_strided.*test_lower.py:\d+ in forward.*reads memory by strides"):
        lower_program(program, moved)


class GroupsOfFrames(torch.nn.Module):
    """A group norm of each frame, of a value whose dims are permuted in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames_last = (2 * x).permute(0, 2, 1, 3)
        return torch.nn.functional.group_norm(frames_last.permute(0, 2, 1, 3).reshape(-1, 4, 8), 2)


def test_group_norms_get_memory_in_the_usual_order_where_a_reshard_changed_it() -> None:
    """A group norm of a permuted value behind a reshard computes the results of one device."""
    mesh, model, x = Mesh({"data": 2}), GroupsOfFrames(), torch.randn(2, 3, 4, 8)
    program = trace(model, (x,), {}, grad=False)
    plan = plan_program(program, mesh, h100s(mesh), PlanOptions(constraints={"input:0": P(), "output:0": P("data")}))
    whole, split = NodePlan((P(),), (P(),)), NodePlan((P("data"),), (P("data"),))
    norm = NodePlan((P("data"),), (P("data"),) * 3)
    changed = {"mul": whole, "permute": whole, "permute_1": split, "view": split, "native_group_norm": norm}
    assert changed.keys() <= plan.nodes.keys()
    lowered = lower_program(program, dataclasses.replace(plan, nodes={**plan.nodes, **changed})).lowered
    results = simulate(lowered.graph_module, mesh, [[x, x]])
    torch.testing.assert_close(torch.cat(results[0]), model(x))


def texts() -> str:
    """The concatenated texts of the lowered programs of all layouts."""
    return "".join(f"{lowered_with(constraints).lowered.graph_module.graph}\n" for constraints in LAYOUTS.values())


SCRIPT = "from tests.passes.lowering.test_lower import texts; print(texts(), end='')"


def test_the_text_does_not_depend_on_the_hash_seed() -> None:
    """A process with another PYTHONHASHSEED lowers to the same text."""
    root = Path(__file__).parents[3]
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONHASHSEED": other, "PYTHONPATH": str(root)},
        capture_output=True, text=True, check=True, timeout=300, cwd=root,
    ).stdout  # fmt: skip
    assert "all_gather" in there
    assert there == texts()
