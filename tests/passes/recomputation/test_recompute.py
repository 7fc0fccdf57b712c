"""`InsertRecompute` clones and offloads values, and proofs refuse wrong clones and copies."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch import fx, nn

from autoshard.errors import PlanMismatchError, VerificationError
from autoshard.ir.lowered import LoweredProgram, PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.offload import Offload, OffloadedNode
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import NodePlan
from autoshard.ir.program import Program
from autoshard.ir.recompute import PHASE, Recompute, RecomputedNode
from autoshard.kernels.offload import from_host, to_host
from autoshard.tracing import trace
from passes.lowering.lower_program import lower_program, prepare
from passes.lowering.split_phases import SplitPhases
from passes.recomputation.recompute import InsertRecompute, moved_by, original_of
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_preparation import verify_preparation
from passes.verification.verify_program import verify_program
from tests.passes.greedy_plans import most_split_plan
from tests.passes.mutations import copy_of

MESH = Mesh({"x": 2})


class Chain(nn.Module):
    """A product, dropout, an exponential and its square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout((x @ self.weight).exp(), 0.5).square().sum()


@cache
def traced() -> Program:
    return trace(Chain(), (torch.randn(8, 16),))


def again(name: str, before: str) -> RecomputedNode:
    return RecomputedNode(name, before, "")


ONE = (again("exp", "mul_2"), again("fan_out_1", "mul_2"))
"""Recompute exp from the product, which the forward saves in place of exp."""
ALL = tuple(again(name, "pow_2") for name in ("mm", "exp", "fan_out_1", "dropout", "fan_out_2"))
"""Recompute all values from the inputs."""


@cache
def lowered_with(nodes: tuple[RecomputedNode, ...], moved: tuple[OffloadedNode, ...] = ()) -> PhasedProgram:
    """The phases of a plan with most splits, which recomputes `nodes` and offloads `moved`."""
    program = InsertRecompute(nodes, moved)(prepare(traced()))
    plan = dataclasses.replace(split_plan(program), recompute=Recompute(nodes), offload=Offload(moved))
    return lower_program(traced(), plan)


def split_plan(program: Program) -> Plan:
    """Return a plan of `program` from a plan of the trace; clones have the specs of their originals."""
    plan = most_split_plan(traced(), MESH)
    named = {node.name: moved_by(node) or original_of(node) or node.name for node in program.graph.nodes}
    nodes = {name: plan.nodes[original] for name, original in named.items() if original in plan.nodes}
    for node in program.graph.nodes:
        if moved_by(node) is not None:
            nodes[node.name] = NodePlan(nodes[node.name].outputs, nodes[node.name].outputs)
    return dataclasses.replace(plan, nodes=nodes, program_digest=program.digest())


def test_clones_stand_before_what_reads_them() -> None:
    """A clone of exp from the saved product stands at the first read in the backward; the forward is unchanged."""
    lines = InsertRecompute(ONE)(prepare(traced())).text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("exp_again"))
    assert [line.partition(": ")[2].partition(" = ")[2] for line in lines[start : start + 3]] == [
        "aten.exp.default(mm)",
        "fan_out(exp_again)",
        "aten.mul.Tensor(dropout_1, fan_out_1_again)",
    ]
    assert lines[:start] == prepare(traced()).text().splitlines()[:start]


def test_clones_read_clones() -> None:
    """A clone reads the clones of its recomputed operands, and only the forward reads the originals."""
    program = InsertRecompute(ALL)(prepare(traced()))
    clones = {original_of(node): node for node in program.graph.nodes if original_of(node)}
    assert list(clones) == [node.name for node in ALL]
    assert clones["exp"].args == (clones["mm"],)
    assert clones["dropout"].args[0] is clones["fan_out_1"]
    assert {node.meta["phase"] for node in clones.values()} == {PHASE}
    nodes = program.nodes_by_name()
    for item in ALL:
        assert {reader.meta["phase"] for reader in nodes[item.name].users} == {"forward"}


def test_without_nodes_the_program_is_the_same() -> None:
    """Without nodes to recompute or offload, `InsertRecompute` returns the same program."""
    program = prepare(traced())
    assert InsertRecompute(())(program) is program


@pytest.mark.parametrize(("nodes", "saved"), [((), {"exp", "dropout"}), (ONE, {"mm", "dropout"}), (ALL, set())])
def test_the_forward_keeps_what_is_not_recomputed(nodes: tuple[RecomputedNode, ...], saved: set[str]) -> None:
    """The forward saves those of the product, exp and dropout that the backward reads and does not recompute."""
    phased = lowered_with(nodes)
    kept = {node.name: node for node in phased.lowered.graph_module.graph.nodes if node.name in phased.saved}
    calls = {node.meta["global"] for node in kept.values() if node.op == "call_function"}
    assert calls & {"mm", "exp", "dropout"} == saved


def test_clones_run_in_the_backward() -> None:
    """Recomputation leaves the forward's calls unchanged, and the backward computes exp once more."""
    plain, phased = lowered_with(()), lowered_with(ALL)

    def calls(graph_module: fx.GraphModule) -> list[str]:
        return [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]

    assert calls(phased.forward) == calls(plain.forward)
    assert calls(phased.backward).count("aten.exp.default") == 1
    assert "aten.exp.default" not in calls(plain.backward)


# Offload.

MOVED = (OffloadedNode("fan_out_1", "mul_2", ""), OffloadedNode("fan_out_2", "pow_2", ""))
"""The backward reads these values of the forward from the host."""
PRODUCT = (OffloadedNode("mm", "mul_2", ""),)
"""The product, from which exp is recomputed, comes back from the host."""


def test_copies_stand_where_values_are_made_and_read() -> None:
    """A copy to the host follows the call, and a copy back precedes the first reader in the backward."""
    program = InsertRecompute((), MOVED)(prepare(traced()))
    nodes = program.nodes_by_name()
    names = list(nodes)
    assert names.index("fan_out_1_host") == names.index("fan_out_1") + 1
    assert names.index("fan_out_1_back") == names.index("mul_2") - 1
    assert nodes["fan_out_1_host"].meta["phase"] == "forward"
    assert nodes["fan_out_1_back"].meta["phase"] == PHASE
    assert {moved_by(nodes[name]) for name in ("fan_out_1_host", "fan_out_1_back")} == {"fan_out_1"}
    for item in MOVED:
        assert {reader.meta["phase"] for reader in nodes[item.name].users} == {"forward"}


def test_clones_read_what_comes_back() -> None:
    """A clone reads its operand's copy from the host, and a plan with the clone before this copy is refused."""
    program = InsertRecompute(ONE, PRODUCT)(prepare(traced()))
    nodes = program.nodes_by_name()
    assert nodes["exp_again"].args == (nodes["mm_back"],)
    with pytest.raises(PlanMismatchError, match="recomputes 'exp' before its operand 'mm'"):
        InsertRecompute(tuple(again(name, "pow_2") for name in ("exp", "fan_out_1")), PRODUCT)(prepare(traced()))


def test_the_forward_keeps_what_lies_on_the_host() -> None:
    """The forward saves host copies in place of the two offloaded values, and the backward copies both back."""
    phased = lowered_with((), MOVED)
    nodes = {node.name: node for node in phased.lowered.graph_module.graph.nodes}
    kept = [nodes[name] for name in phased.saved if nodes[name].op == "call_function"]
    assert [node.target for node in kept] == [to_host, to_host]
    backward = [node.target for node in phased.backward.graph.nodes]
    assert backward.count(from_host) == 2


# Verification.


def verify(phased: PhasedProgram) -> None:
    verify_preparation(traced(), phased.lowered.traced)
    verify_program(prepare(traced()), phased.lowered)
    verify_phases(phased)


@pytest.mark.parametrize(
    ("nodes", "moved"), [(ONE, ()), (ALL, ()), ((), MOVED), (ONE, (OffloadedNode("mm", "mul_2", ""),))]
)
def test_what_is_there_again_is_proven(nodes: tuple[RecomputedNode, ...], moved: tuple[OffloadedNode, ...]) -> None:
    """Programs that recompute or offload pass `verify_preparation`, `verify_program` and `verify_phases`.

    `verify_program` accepts the lowered program beside the prepared program without clones and with clones.
    """
    verify(lowered_with(nodes, moved))
    verify_program(lowered_with(nodes, moved).lowered.traced, lowered_with(nodes, moved).lowered)


def fetch_another_value(graph: fx.Graph) -> None:
    first, second = (node for node in graph.nodes if node.target is from_host)
    first.args = second.args


def fetch_what_never_left(graph: fx.Graph) -> None:
    back = next(node for node in graph.nodes if node.target is from_host)
    back.args = back.args[0].args


def read_on_the_host(graph: fx.Graph) -> None:
    back = next(node for node in graph.nodes if node.target is from_host)
    reader = next(iter(back.users))
    reader.replace_input_with(back, back.args[0])


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (fetch_another_value, "is part of no proof"),
        (fetch_what_never_left, "which does not lie on the host"),
        (read_on_the_host, "which lies on the host"),
    ],
)
def test_a_wrong_copy_is_refused(mutate: object, message: str) -> None:
    """A copy of another value, a copy from the wrong side, and a call on a host value are refused."""
    lowered = lowered_with((), MOVED).lowered
    module = copy_of(lowered.graph_module)
    mutate(module.graph)  # type: ignore[operator]
    with pytest.raises(VerificationError, match=message):
        verify_program(prepare(traced()), dataclasses.replace(lowered, graph_module=module))


def clone_of(graph: fx.Graph, target: str) -> fx.Node:
    return next(node for node in graph.nodes if str(node.target) == target and node.meta["phase"] == PHASE)


def read_another_operand(graph: fx.Graph) -> None:
    clone = clone_of(graph, "aten.exp.default")
    clone.args = (clone.args[0].args[0],)


def draw_another_mask(graph: fx.Graph) -> None:
    clone = clone_of(graph, "autoshard.dropout.default")
    clone.args = (*clone.args[:3], 1, *clone.args[4:])


def draw_with_another_rate(graph: fx.Graph) -> None:
    clone = clone_of(graph, "autoshard.dropout.default")
    clone.args = (*clone.args[:2], 0.25, *clone.args[3:])


def call_another_operator(graph: fx.Graph) -> None:
    clone_of(graph, "aten.exp.default").target = torch.ops.aten.expm1.default


def reduce_under_another_spec(graph: fx.Graph) -> None:
    clone, reader = clone_of(graph, "aten.mm.default"), clone_of(graph, "aten.exp.default")
    with graph.inserting_before(reader):
        summed = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (clone, "sum", "x"))
        waited = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (summed,))
    waited.meta, summed.meta = dict(clone.meta), dict(clone.meta)
    reader.args = (waited,)


MUTATIONS = [
    read_another_operand,
    draw_another_mask,
    draw_with_another_rate,
    call_another_operator,
    reduce_under_another_spec,
]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_wrong_clone_is_refused(mutate: object) -> None:
    """A clone with another operand, mask, rate, operator or spec is refused, and so are its phases."""
    lowered = lowered_with(ALL).lowered
    module = copy_of(lowered.graph_module)
    mutate(module.graph)  # type: ignore[operator]
    changed = dataclasses.replace(lowered, graph_module=module)
    with pytest.raises(VerificationError):
        verify_program(prepare(traced()), changed)
    assert not_the_phases_of(changed, lowered)


def not_the_phases_of(changed: LoweredProgram, lowered: LoweredProgram) -> bool:
    """Whether `verify_phases` refuses phases cut from `changed` as the phases of `lowered`."""
    cut = SplitPhases()(changed)
    try:
        verify_phases(dataclasses.replace(cut, lowered=lowered))
    except VerificationError:
        return True
    return False


def test_a_wrong_clone_in_the_prepared_program_is_refused() -> None:
    """`verify_preparation` refuses a clone with a wrong operand, and names the gradient that is wrong."""
    program = InsertRecompute(ALL)(prepare(traced()))
    nodes = program.nodes_by_name()
    nodes["exp_again"].args = (nodes["fan_out"],)
    with pytest.raises(VerificationError, match="gradient 'weight'"):
        verify_preparation(traced(), program)


# What a program cannot recompute.


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((again("exp", "nowhere"),), "names node 'nowhere', which this program does not compute"),
        ((again("p_weight", "mul_2"),), "names node 'p_weight', which this program does not compute"),
        (
            (again("exp", "t"), again("fan_out_1", "t")),
            "fetches 'fan_out_1' before 't', but 'mul_2' reads it earlier",
        ),
        ((again("exp", "pow_2"), again("mm", "mul_2")), "recomputes 'exp' before its operand 'mm'"),
    ],
)
def test_errors(nodes: tuple[RecomputedNode, ...], message: str) -> None:
    """A plan is refused if a node is unknown, or its clone would stand too late or too early; the error names nodes."""
    with pytest.raises(PlanMismatchError, match=message):
        InsertRecompute(nodes)(prepare(traced()))
