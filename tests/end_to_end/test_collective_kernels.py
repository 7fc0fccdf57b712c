"""Fused kernels beside collectives: one adds and normalises received values, one casts and splits values to send."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from autoshard.ir.boundary import shard_all
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import InputKind, InputSlot
from autoshard.ir.spec import PartitionSpec as P
from autoshard.runtime.simulator import simulate
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.choose_groups import is_view
from passes.lowering.count_launches import Traffic, is_launch
from passes.lowering.lower_program import lower_program
from passes.lowering.lowering_options import LoweringOptions
from passes.lowering.split_phases import SplitPhases
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_program import verify_program
from tests.passes.blocks import h100s
from tests.passes.families import FAMILIES
from tests.passes.launches import count_launches
from tests.passes.layouts import LAYOUTS, Layout, lowered_under, traced_of

_TENSOR_AND_SEQUENCE = LAYOUTS["tensor and sequence"]
TENSOR_PARALLEL = {
    "up.weight": P("model"), "up.bias": P("model"), "down.weight": P(None, "model"), "down.bias": P(), "norm.*": P(),
    "next.*": P(),
}  # fmt: skip
"""Megatron's layout: `down` computes partial sums, which an all-reduce adds up."""

_SAVED = {"gpt": (0.6, 0.8), "llama": (0.7, 0.8), "mixture": (0.6, 0.85)}
"""For each family, the largest launches and bytes with kernels, as shares of the counts without kernels."""


class Tail(nn.Module):
    """The end of a block and the norm of the next block: mean square of next(norm(x + down(tanh(up(x)))))."""

    def __init__(self, norm: nn.Module, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, inner), nn.Linear(inner, width), norm
        self.next = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.next(self.norm(x + self.down(torch.tanh(self.up(x))))).square().mean()


Built = tuple[Any, tuple[torch.Tensor, ...]]


def _family(name: str) -> Built:
    torch.manual_seed(0)
    model, inputs = FAMILIES[name]()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.float(), tuple(item.float() if item.is_floating_point() else item for item in inputs)


def _tail(norm: nn.Module, width: int, inner: int, rows: tuple[int, int]) -> Built:
    torch.manual_seed(0)
    return Tail(norm, width, inner), (torch.randn(*rows, width),)


def _phases(built: Built, layout: Layout) -> PhasedProgram:
    program = traced_of(*built, updates=False, precision=layout.precision)
    return lowered_under(layout, program, with_overlap=False)


def _values(phased: PhasedProgram, built: Built) -> list[Any]:
    """Return the shards of each program input: model inputs, parameters and buffers, and ones for all others."""
    model, inputs = built
    state, drawn = {**dict(model.named_parameters()), **dict(model.named_buffers())}, iter(inputs)

    def whole(slot: Any) -> torch.Tensor:
        if slot.slot.kind is InputKind.INPUT:
            return next(drawn)
        known = state.get(slot.slot.name)  # what is not of the model: the loss's gradient, the seed
        return torch.ones(slot.shape, dtype=slot.dtype) if known is None else known.detach()

    return [shard_all(whole(slot), slot.spec, phased.lowered.mesh) for slot in phased.lowered.inputs]


def _run(phased: PhasedProgram, values: Sequence[Any]) -> list[list[torch.Tensor]]:
    """Return the results of forward and backward on each rank."""
    mesh = phased.lowered.mesh
    made = simulate(phased.forward, mesh, [values[index] for index in phased.forward_inputs])
    count = len(phased.forward_outputs)
    behind = [*made[count:], *(values[index] for index in phased.backward_inputs)]
    return [*made[:count], *simulate(phased.backward, mesh, behind)]


def _check(fused: PhasedProgram, built: Built, tolerance: float = 1e-5) -> PhasedProgram:
    """Check that kernels verify and compute the same results on the simulator; return the phases without kernels."""
    verify_program(fused.lowered.traced, fused.lowered)
    verify_phases(fused)
    plain, values = SplitPhases()(fused.lowered), _values(fused, built)
    for expected, actual in zip(_run(plain, values), _run(fused, values), strict=True):
        torch.testing.assert_close(actual, expected, rtol=100 * tolerance, atol=tolerance)
    return plain


def _count(phased: PhasedProgram) -> Traffic:
    return count_launches(phased.forward) + count_launches(phased.backward)


def _received(graph: fx.Graph, kind: str) -> Iterator[set[str]]:
    """Return the names of the operators that read the results of each collective of a kind."""
    for node in graph.nodes:
        if "wait_tensor" in str(node.target) and kind in str(node.all_input_nodes[0].target):
            yield {
                _name(user) for user in graph.nodes if is_launch(user) and node in map(view_base, user.all_input_nodes)
            }


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("autoshard.").removesuffix(".default")


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", _SAVED)
def test_programs_with_kernels_at_collectives_equal_those_without(family: str) -> None:
    """Fused programs verify, keep loss and gradients, and need fewer launches and bytes under tensor parallelism.

    Copies that join or split a message belong to the kernel that computes the message.
    """
    built = _family(family)
    layout = Layout(_TENSOR_AND_SEQUENCE.parameter, _TENSOR_AND_SEQUENCE.batch, dtype=torch.float32, kernels=True)
    fused = _phases(built, layout)
    plain = _check(fused, built)
    before, after = _count(plain), _count(fused)
    launches, size = _SAVED[family]
    assert after.launches <= launches * before.launches
    assert after.memory_bytes <= size * before.memory_bytes
    assert _copies_alone(fused) < _copies_alone(plain)


def _copies_alone(phased: PhasedProgram) -> int:
    nodes = [*phased.forward.graph.nodes, *phased.backward.graph.nodes]
    return sum(is_launch(node) and _name(node) == "aten.contiguous" for node in nodes)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_what_follows_a_partial_sum_is_one_kernel(norm: str) -> None:
    """After the all-reduce of a partial sum, one kernel computes bias, residual and norm."""
    mesh = Mesh({"model": 2})
    with torch.device("meta"):
        built = _tail(nn.LayerNorm(1024) if norm == "layer" else nn.RMSNorm(1024), 1024, 4096, (2, 512))
        for frozen in (built[0].norm, built[0].next):  # else their gradients decide where rows lie
            frozen.requires_grad_(False)
        built[0].down.bias.requires_grad_(False)
    program = traced_of(*built, updates=False)
    whole = {name: P() for name in ("add_tensor_1", "view_3", "add")}  # sums over ranks, and no pieces of them
    options = PlanOptions(constraints=TENSOR_PARALLEL, specs=whole, with_baselines=False)
    plan = plan_program(program, mesh, h100s(mesh), options)
    fused = lower_program(program, plan, options=LoweringOptions(with_kernels=True))
    verify_phases(fused)
    plain = SplitPhases()(fused.lowered)
    assert list(_received(plain.forward.graph, "reduce")) == [{"aten.add.Tensor"}]
    assert list(_received(fused.forward.graph, "reduce")) == [{f"triton_bias_add_{norm}_norm"}]


def test_what_is_sent_is_cast_and_split_at_once() -> None:
    """One kernel converts an input to bfloat16 and cuts the input into the pieces that are sent."""
    built = _tail(nn.LayerNorm(8), 8, 16, (4, 6))
    layout = Layout(_columns, lambda *_: (P(("data", "model")),), None, torch.float32, "bf16", kernels=True)
    fused = _phases(built, layout)
    plain = _check(fused, built, tolerance=1e-2)
    assert _name(_sender(plain.forward.graph)) == "aten.contiguous"
    assert _name(_sender(fused.forward.graph)).startswith("triton_to_copy_contiguous")


def _columns(_: InputSlot, shape: tuple[int, ...], __: int) -> Sequence[P]:
    return (P(None, "model"),) if len(shape) == 2 else ()


def _sender(graph: fx.Graph) -> fx.Node:
    """Return the node that computes the operand of the first all-to-all."""
    exchange = next(node for node in graph.nodes if "all_to_all_single" in str(node.target))
    sent = view_base(exchange.all_input_nodes[0])
    return sent.all_input_nodes[0] if sent.target is operator.getitem else sent


def view_base(node: fx.Node) -> fx.Node:
    """Return the node below a chain of views."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node
