"""Canonical programs keep their results, have no `addmm`, and save no views for the backward."""

from __future__ import annotations

import torch

from autoshard.ir.program import Program
from autoshard.tracing import trace
from passes.preparation.canonicalize import Canonicalize, is_view
from passes.preparation.insert_fan_outs import InsertFanOuts
from tests.passes.blocks import Block, Perceptron


def block_program() -> Program:
    """A block with a loss, on the CPU."""
    torch.manual_seed(0)
    block = torch.nn.Sequential(Block(8))
    return trace(torch.nn.Sequential(block, Mean()), (torch.randn(2, 4, 8),), {})


class Mean(torch.nn.Module):
    """A scalar loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def run(program: Program) -> list[torch.Tensor]:
    """Run a program on values that are drawn with a fixed seed."""
    numbers = torch.Generator().manual_seed(1)
    nodes = program.nodes_by_name()
    values = [torch.randn(nodes[slot.node].meta["val"].shape, generator=numbers) for slot in program.inputs]
    return list(program.graph_module(*values))


def test_results_stay_the_same() -> None:
    """Canonicalization, and fan-outs after it, keep the values and names of all outputs and gradients."""
    for program in (block_program(), trace(Perceptron(), (torch.randn(4, 16), torch.randn(4, 16)), {})):
        expected = run(program)
        for rewritten in (Canonicalize()(program), InsertFanOuts()(Canonicalize()(program))):
            torch.testing.assert_close(run(rewritten), expected)
            assert [slot.name for slot in rewritten.outputs] == [slot.name for slot in program.outputs]


def test_biased_products_become_a_product_and_a_sum() -> None:
    """Each of two `addmm` becomes an `mm`, and no `addmm` is left."""
    program = trace(Perceptron(), (torch.randn(4, 16), torch.randn(4, 16)), {})
    before = [str(node.target) for node in program.graph.nodes]
    after = [str(node.target) for node in Canonicalize()(program).graph.nodes]
    biased = before.count("aten.addmm.default")
    assert biased == 2
    assert after.count("aten.addmm.default") == 0
    assert after.count("aten.mm.default") == before.count("aten.mm.default") + biased


def test_the_backward_reads_no_view_of_the_forward() -> None:
    """The backward makes its views anew, so that saved values own their memory."""
    program = Canonicalize()(block_program())
    for node in program.graph.nodes:
        if node.op == "call_function" and node.meta["phase"] == "backward":
            read = [operand for operand in node.all_input_nodes if operand.op == "call_function"]
            assert not any(is_view(operand) and operand.meta["phase"] == "forward" for operand in read)


def test_the_given_program_stays_as_it_is() -> None:
    """The passes leave the given program unchanged, because they work on a copy."""
    program = block_program()
    text = program.text()
    InsertFanOuts()(Canonicalize()(program))
    assert program.text() == text
