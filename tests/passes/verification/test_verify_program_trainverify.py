"""The fourteen bugs of TrainVerify's artifact, made in a lowered program, change numbers and are refused.

TrainVerify: Lu, Miao, Tan, Huang, Zhu, Zhang, Yang, "TrainVerify: Equivalence-Based Verification for Distributed LLM
Training", SOSP 2025. The bugs are listed in section "Bug Reproduction" of the artifact's README (branch `ae` of
github.com/verify-llm/TrainVerify). The tests keep the numbers of the list.

The artifact's base is Llama 3 with two ways each of data, tensor and pipeline parallelism and two micro-batches. Our
base is one layer on data x model, a whole step with AdamW and two micro-batches. The layer has an explicit norm, rotary
positions and scaled scores, which the bugs need.

Two bugs have no literal counterpart. Our programs have no stages, so bug 6, a transfer between wrong ranks of stages,
is a transfer between wrong ranks. Micro-batches are a loop of our runtime, so bug 14, gradients reduced before the last
micro-batch, is a gradient reduced before its last contribution. One text serves all ranks, so a mutant of a single rank
reads its index.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.ir.local import axis_index
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.program import Program
from tests.passes.families import LENGTH, VOCABULARY, WIDTH, language_loss, tokens
from tests.passes.layouts import LAYOUTS, lowered_under, traced_of
from tests.passes.mutant_runs import Run, run_of
from tests.passes.mutants import Mutant, Place
from tests.passes.mutations import REDUCING, alike, copy_of, insert

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Bug = Callable[[fx.Graph], None]


class Layer(nn.Module):
    """A language model of one decoder layer with an explicit norm, rotary positions and scaled scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        angles = torch.outer(torch.arange(LENGTH), torch.tensor([1.0, 0.1]))
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.embed(x)
        y = self._norm(h)
        q, k, v = (layer(y).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = (self._rotate(q) @ self._rotate(k).transpose(2, 3)) / 2.0
        h = h + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return language_loss(self.head(h + self.down(self.up(self._norm(h)).relu())), target)

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2) * self.scale

    def _rotate(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * self.cos + torch.cat([-right, left], -1) * self.sin


@cache
def base(layout: str) -> tuple[Program, PhasedProgram, Run]:
    """The trace, the right phases under a layout, and their run."""
    torch.manual_seed(0)
    inputs = (tokens(1), tokens(2))
    program = traced_of(Layer().double(), inputs, updates=LAYOUTS[layout].updates)
    phased = lowered_under(LAYOUTS[layout], program)
    return program, phased, run_of(phased, inputs)


def first(graph: fx.Graph, wanted: Callable[[Any], bool]) -> Any:
    """The first call for which `wanted` is true."""
    return next(node for node in graph.nodes if node.op == "call_function" and wanted(node))


def calls(target: Any, phase: str | None = None) -> Callable[[Any], bool]:
    """Return a function that tells whether a node calls `target`, in `phase` if given."""
    return lambda node: node.target is target and (phase is None or node.meta.get("phase") == phase)


def sums(node: Any, axis: str | None = None) -> bool:
    """Whether a node waits for an all-reduce that adds floating values of several elements, over `axis` if given."""
    if node.target is not c10d.wait_tensor.default or node.args[0].target is not c10d.all_reduce.default:
        return False
    if axis is not None and node.args[0].args[2] != axis:
        return False
    return node.args[0].args[1] == "sum" and node.meta["val"].is_floating_point() and node.meta["val"].numel() > 1


def on_rank_zero(graph: fx.Graph, before: fx.Node, value: float) -> fx.Node:
    """Return a number: `value` on ranks with index 0 along "model", else 0."""
    with graph.inserting_before(before):
        index = graph.call_function(axis_index, ("model",))
        return graph.call_function(operator.mul, (graph.call_function(operator.eq, (index, 0)), value))


def bug_1_missing_allreduce(graph: fx.Graph) -> None:
    """Remove an all-reduce, so that ranks compute with their addends."""
    wait = first(graph, sums)
    wait.replace_all_uses_with(wait.args[0].args[0])
    graph.erase_node(wait)


def bug_2_missing_allreduce_and_dataflow(graph: fx.Graph) -> None:
    """Replace a reduced value by zeros, because its readers would read memory that nobody wrote."""
    wait = first(graph, sums)
    with graph.inserting_before(wait):
        nothing = graph.call_function(aten.zeros_like.default, (wait.args[0].args[0],))
    wait.replace_all_uses_with(nothing)
    graph.eliminate_dead_code()


def bug_3_allreduce_replaced_by_allgather(graph: fx.Graph) -> None:
    reduction = first(graph, sums).args[0]
    reduction.target = c10d.all_gather_into_tensor.default
    reduction.args = (reduction.args[0], 2, reduction.args[2])


def bug_4_allgather_replaced_by_allreduce(graph: fx.Graph) -> None:
    gather = first(graph, calls(c10d.all_gather_into_tensor.default))
    gather.target = c10d.all_reduce.default
    gather.args = (gather.args[0], "sum", gather.args[2])


def bug_5_missing_reduction_in_backward(graph: fx.Graph) -> None:
    """Remove an all-reduce over the tensor-parallel axis from the backward."""
    wait = first(graph, lambda node: sums(node, "model") and node.meta.get("phase") == "backward")
    wait.replace_all_uses_with(wait.args[0].args[0])
    graph.erase_node(wait)


def bug_6_wrong_ranks(graph: fx.Graph) -> None:
    """Gather pieces over the other axis of the mesh."""
    gather = first(graph, calls(c10d.all_gather_into_tensor.default, "forward"))
    other = {"data": "model", "model": "data"}
    gather.args = (*gather.args[:2], other[gather.args[2]])


def bug_7_add_on_one_rank(graph: fx.Graph) -> None:
    """Add 2 to a sum, only on the ranks with index 0 along "model"."""
    node = first(graph, calls(aten.add.Tensor, "forward"))
    insert(graph, node, aten.add.Tensor, on_rank_zero(graph, node, 2.0))


def bug_8_pow_on_one_rank(graph: fx.Graph) -> None:
    """Compute x ** 3 in place of x ** 2, only on the ranks with index 0 along "model"."""
    node = first(graph, calls(aten.pow.Tensor_Scalar, "forward"))
    with graph.inserting_before(node):
        exponent = graph.call_function(operator.add, (on_rank_zero(graph, node, 1.0), 2.0))
    node.args = (node.args[0], exponent)


def bug_9_add_on_all_ranks(graph: fx.Graph) -> None:
    node = first(graph, calls(aten.add.Tensor, "forward"))
    insert(graph, node, aten.add.Tensor, 2.0)


def bug_10_addend_left_out_on_one_rank(graph: fx.Graph) -> None:
    """Leave an addend of a gradient out, only on the ranks with index 0 along "model"."""
    node = first(graph, lambda node: calls(aten.add.Tensor, "backward")(node) and alike(*node.args))
    left, right = node.args
    with graph.inserting_before(node):
        part = graph.call_function(aten.mul.Tensor, (left, on_rank_zero(graph, node, 1.0)))
        other = graph.call_function(aten.sub.Tensor, (right, part))
    part.meta = other.meta = dict(left.meta)
    node.args = (left, other)


def bug_11_rotary_gradients_exchanged(graph: fx.Graph) -> None:
    """Exchange the gradients of the rotated queries and keys."""
    halves = [node for node in graph.nodes if calls(aten.mul.Tensor, "backward")(node) and _rotates(node)]
    left, right = next(
        (left, right) for left in halves for right in halves
        if left.args[1] is right.args[1] and left.args[0] is not right.args[0] and alike(left, right)
    )  # fmt: skip
    left.args, right.args = (right.args[0], left.args[1]), (left.args[0], right.args[1])
    graph.lint()


def _rotates(node: Any) -> bool:
    """Whether a product's second operand is computed from the table of cosines or sines."""
    operand = node.args[1]
    while isinstance(operand, fx.Node) and operand.op != "placeholder" and operand.all_input_nodes:
        operand = operand.all_input_nodes[0]
    return isinstance(operand, fx.Node) and operand.name in ("b_cos", "b_sin", "cos", "sin")


def bug_12_scaling_on_one_rank(graph: fx.Graph) -> None:
    """Divide scores by 4 in place of 2, only on the ranks with index 0 along "model"."""
    node = first(graph, calls(aten.div.Tensor, "forward"))
    with graph.inserting_before(node):
        divisor = graph.call_function(operator.add, (on_rank_zero(graph, node, 2.0), 2.0))
    node.args = (node.args[0], divisor)


def bug_13_scaling_on_all_ranks(graph: fx.Graph) -> None:
    node = first(graph, calls(aten.div.Tensor, "forward"))
    node.args = (node.args[0], 4.0)


def bug_14_reduced_before_the_last_operator(graph: fx.Graph) -> None:
    """Reduce a gradient before the last of its contributions is added."""
    reader, addition = next(filter(None, map(_last_addition, graph.nodes)))
    reader.replace_input_with(addition, addition.args[0])


def _last_addition(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """Return the reader of the last addition in front of a reduction, and the addition; None for other nodes."""
    if node.target not in REDUCING:
        return None
    reader, value = node, node.args[0]
    while value.target in (aten.contiguous.default, aten.view.default):
        reader, value = value, value.args[0]
    return (reader, value) if calls(aten.add.Tensor, "backward")(value) and alike(*value.args) else None


BUGS: tuple[Bug, ...] = (
    bug_1_missing_allreduce, bug_2_missing_allreduce_and_dataflow, bug_3_allreduce_replaced_by_allgather,
    bug_4_allgather_replaced_by_allreduce, bug_5_missing_reduction_in_backward, bug_6_wrong_ranks,
    bug_7_add_on_one_rank, bug_8_pow_on_one_rank, bug_9_add_on_all_ranks, bug_10_addend_left_out_on_one_rank,
    bug_11_rotary_gradients_exchanged, bug_12_scaling_on_one_rank, bug_13_scaling_on_all_ranks,
    bug_14_reduced_before_the_last_operator,
)  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["two axes", "tensor"])
def test_the_program_without_a_bug_is_proven(layout: str) -> None:
    """The program without a bug is accepted, and has the right numbers."""
    traced, phased, run = base(layout)
    assert not _mutant(phased, lambda graph: None).is_refused(traced)
    assert not run.is_changed_by(_mutant(phased, lambda graph: None))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_is_refused(bug: Bug) -> None:
    """Each of the fourteen bugs changes numbers and is refused."""
    traced, phased, run = base("tensor" if bug is bug_5_missing_reduction_in_backward else "two axes")
    mutant = _mutant(phased, bug)
    assert run.is_changed_by(mutant)
    assert mutant.is_refused(traced)


def _mutant(phased: PhasedProgram, bug: Callable[[fx.Graph], None]) -> Mutant:
    module = copy_of(phased.lowered.graph_module)
    bug(module.graph)
    wrong = replace(phased, lowered=replace(phased.lowered, graph_module=module))
    return Mutant(Place.PROGRAM, getattr(bug, "__name__", ""), "", wrong, phased.lowered.traced)
