"""Halves of a backward that together are not the whole are refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import fx, nn

import autoshard
from autoshard import Mesh
from autoshard.errors import VerificationError
from autoshard.ir.lowered import BackwardHalves, PhasedProgram
from passes.lowering.cut_backward import CutBackward
from passes.verification.verify_cut_backward import verify_cut_backward

MM = torch.ops.aten.mm.default


@cache
def stage() -> PhasedProgram:
    """Return the second of two stages, which sends the gradient of its input."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"optimizer": optimizer, "loss_fn": nn.functional.mse_loss, "time_budget_s": 2.0}
    step = autoshard.compile(model, Mesh({"pipeline": 2}), micro_batches=2, **options)
    step.compile_for(torch.randn(4, 4), torch.randn(4, 4))
    program = step.sharded.program
    assert program is not None, "it was compiled"
    assert program.staged is not None, "into stages"
    return program.staged.stages[1].phased


def halves_of(phased: PhasedProgram) -> BackwardHalves:
    """Return the halves of a stage's backward."""
    assert phased.halves is not None, "its backward was cut"
    return phased.halves


def with_halves(inputs: fx.GraphModule, weights: fx.GraphModule) -> PhasedProgram:
    """The stage with the given halves of its backward."""
    return replace(stage(), halves=BackwardHalves(inputs, weights))


def test_the_first_half_is_what_the_stage_before_waits_for() -> None:
    """A right cut is accepted, and each half of the backward has two of the four matrix products."""
    cut = CutBackward()(stage())
    verify_cut_backward(cut)
    halves = halves_of(cut)
    products = [
        len(list(half.graph.find_nodes(op="call_function", target=MM))) for half in (halves.inputs, halves.weights)
    ]
    assert products == [2, 2]


def test_another_second_half_is_refused() -> None:
    """A second half with another operator, a missing value or exchanged results is refused."""
    halves = halves_of(CutBackward()(stage()))
    other = copy.deepcopy(halves.weights)
    next(iter(other.graph.find_nodes(op="call_function", target=MM))).target = torch.ops.aten.matmul.default
    with pytest.raises(VerificationError, match="is no call of the whole program"):
        verify_cut_backward(with_halves(halves.inputs, other))
    with pytest.raises(VerificationError, match="is given"):
        verify_cut_backward(with_halves(halves.weights, halves.inputs))
    swapped = copy.deepcopy(halves.weights)
    output = swapped.graph.output_node()
    output.args = (tuple(output.args[0][::-1]),)  # type: ignore[index]
    with pytest.raises(VerificationError, match="where the whole returns"):
        verify_cut_backward(with_halves(halves.inputs, swapped))
