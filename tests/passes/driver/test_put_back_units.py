"""A deep model that is traced without inner blocks, which are then put back, has the program of a whole trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autoshard
from autoshard import Mesh, Recipe
from autoshard.ir.program import Program
from autoshard.tracing import leave_out_blocks, trace
from passes.driver.put_back_units import put_back_units
from passes.strategies.repeated import NotAlikeError
from tests import models

Inputs = dict[str, Tensor]


def put_back(model: nn.Module, inputs: Inputs, margin: int) -> Program:
    """The program of a trace without inner blocks, with the blocks put back."""
    short = leave_out_blocks(model, margin, least=1)
    assert short is not None
    return put_back_units(replace(trace(short.model, (), inputs), repeats=short.repeats))


def check_equal(model: nn.Module, inputs: Inputs, margin: int) -> None:
    """Check that the program with blocks put back equals a whole trace in text, inputs, outputs and modules."""
    found, whole = put_back(model, inputs, margin), trace(model, (), inputs)
    assert found.text() == whole.text()
    assert (found.inputs, found.outputs, found.unreached) == (whole.inputs, whole.outputs, whole.unreached)
    assert [node.meta["module"] for node in found.graph.nodes] == [node.meta["module"] for node in whole.graph.nodes]


SLOW = pytest.mark.slow
MODELS = [
    pytest.param(models.llama, 6, 1, id="llama"),
    pytest.param(models.t5, 8, 2, id="t5", marks=SLOW),
    pytest.param(models.mixtral, 6, 1, id="mixtral", marks=SLOW),
    pytest.param(models.bert, 6, 1, id="bert", marks=SLOW),
    pytest.param(models.vit, 8, 2, id="vit", marks=SLOW),
]


@pytest.mark.parametrize(("build", "layers", "margin"), MODELS)
def test_programs_are_those_of_whole_traces(
    build: Callable[..., tuple[nn.Module, Inputs]], layers: int, margin: int
) -> None:
    """For models of `transformers`, the program with blocks put back equals a whole trace."""
    check_equal(*build(layers=layers), margin)


class _Block(nn.Module):
    """A residual block, with a buffer that each call updates if `counts`."""

    def __init__(self, inner: int, *, counts: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, inner), nn.Linear(inner, 4)
        self.counts = counts
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        return x + self.down(self.up(x).relu()) * scale


class _Stack(nn.Module):
    """Blocks of one kind, or of two kinds in turn if `alternates`.

    The loss reads the outputs of the last `reads` blocks.
    """

    def __init__(self, blocks: int, *, alternates: bool = False, counts: bool = False, reads: int = 1) -> None:
        super().__init__()
        inner = [6 if alternates and number % 2 else 8 for number in range(blocks)]
        self.layers = nn.ModuleList(_Block(width, counts=counts) for width in inner)
        self.scale = nn.Parameter(torch.ones(4))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        scale, outputs = self.scale.exp(), list[Tensor]()
        for layer in self.layers:
            x = layer(x, scale)
            outputs.append(x)
        return torch.stack([output.square().mean() for output in outputs[-self.reads :]]).sum()


@settings(max_examples=5)
@given(st.integers(7, 9), st.booleans(), st.booleans(), st.integers(1, 2))
def test_drawn_stacks(units: int, alternates: bool, counts: bool, reads: int) -> None:
    """Stacks of one or two kinds of blocks, with or without updated buffers, have the program of a whole trace."""
    model = _Stack(2 * units if alternates else units, alternates=alternates, counts=counts, reads=reads)
    check_equal(model, {"x": torch.randn(2, 4)}, 2)


def test_values_of_inner_blocks_that_others_read_are_refused() -> None:
    """A model whose loss reads the outputs of inner blocks is refused with NotAlikeError."""
    with pytest.raises(NotAlikeError):
        put_back(_Stack(10, reads=10), {"x": torch.randn(2, 4)}, 1)


def test_blocks_that_draw_numbers_are_refused() -> None:
    """A model with dropout in its blocks is refused with NotAlikeError."""
    with pytest.raises(NotAlikeError):
        put_back(*models.gpt2(layers=6, dropout=0.1), 1)


def test_plans_with_stages_are_plans_of_the_whole_program() -> None:
    """The plan of a deep model with stages has the digest of the whole trace, so that it compiles."""
    model, x = _Stack(14), torch.randn(8, 4)
    options: dict[str, Any] = {
        "optimizer": "sgd",
        "global_batch": 8,
        "recipe": Recipe(micro_batch=2),
        "precision": None,
    }
    plan = autoshard.plan(model, Mesh({"pipeline": 2}), example_inputs=(x,), **options)
    assert plan.stages
    assert plan.program_digest == trace(model, (x[:2],)).digest()
