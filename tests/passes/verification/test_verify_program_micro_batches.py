"""Values carried into the update are sums over micro-batches, and are refused if they do not add up."""

from __future__ import annotations

from functools import cache, partial
from random import Random

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh, NotAvailableError, P, VerificationError
from autoshard.ir.lowered import PhasedProgram
from autoshard.runtime.executor import check_sums
from autoshard.testing import WholeStep
from autoshard.tracing import trace
from passes.lowering.lower_program import lower_program
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_program import verify_program
from tests.passes.greedy_plans import most_split_plan
from tests.passes.mutant_runs import run_of
from tests.passes.mutants import Place, mutate

PAIR = Mesh({"data": 2})
CLIPPED = WholeStep(partial(torch.optim.AdamW, lr=0.1), max_grad_norm=0.01)
X = torch.linspace(-1, 1, 32).view(4, 8)


class Mean(nn.Module):
    """A product with a flat weight, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.view(8, 8)).square().mean()


@cache
def clipped() -> PhasedProgram:
    """The phases of a step that clips, with the batch and the gradient split."""
    model = Mean().double()
    program = trace(model, (X.double(),), update=CLIPPED.update(model))
    return lower_program(program, most_split_plan(program, PAIR))


def test_a_call_of_the_update_for_each_part_is_refused() -> None:
    """A call of the update that runs once per micro-batch is refused, because norms of two gradients do not add up."""
    phased, run = clipped(), run_of(clipped(), (X.double(),))
    verify_program(phased.lowered.traced, phased.lowered, phased.carried)
    drawn = [mutate(phased, Place.MICRO_BATCHES, "update_too_early", Random(seed)) for seed in range(12)]
    found = {mutant.what: mutant for mutant in drawn if mutant is not None}
    changing = [mutant for mutant in found.values() if run.is_changed_by(mutant)]
    assert any("sum_of_squares" in mutant.what for mutant in changing)
    for mutant in changing:
        verify_phases(mutant.phased)
        verify_program(mutant.prepared, mutant.phased.lowered)
        with pytest.raises(VerificationError, match="is carried into the update, and so added up over micro-batches"):
            mutant.check(mutant.prepared)


def test_what_the_update_does_not_read_is_refused() -> None:
    """A carried value that the update does not read, or that is no node, is refused."""
    phased = clipped()
    prepared = phased.lowered.traced
    with pytest.raises(VerificationError, match=f"node '{phased.saved[0]}' .* is carried into the update"):
        verify_program(prepared, phased.lowered, phased.saved[:1])
    with pytest.raises(VerificationError, match=r"\['nothing'\] are carried into the update, and the"):
        verify_program(prepared, phased.lowered, ("nothing",))


def test_a_gradient_that_awaits_a_product_is_refused_by_name() -> None:
    """A carried gradient whose pending reduction is a product is refused, because only sums add up."""
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.cat([X, X])
    step = autoshard.compile(model, PAIR, optimizer=optimizer, micro_batches=2, verify=False, example_inputs=(batch,))
    phased = step.sharded.program.phased
    nodes = {node.name: node for node in phased.lowered.graph_module.graph.nodes}
    nodes[phased.carried[0]].meta["spec"] = P(partial={"data": "product"})
    with pytest.raises(NotAvailableError, match="only if their reduction is a sum"):
        check_sums(phased)
