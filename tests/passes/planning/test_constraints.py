"""Plans follow constraints on specs, and impossible constraints are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard import InvalidSpecError, Mesh, P
from autoshard.ir.program import InputKind, InputSlot
from autoshard.ir.staged import crossing_name
from passes.planning.constraints import matching
from tests.passes.deep import adamw, alike, short_step, step


@pytest.mark.parametrize("name", ["weight", "input:0", "output:0"])
def test_a_spec_of_more_dims_than_there_are_is_refused(name: str) -> None:
    """A spec of three dims is refused for a parameter, an input and an output of two dims."""
    with pytest.raises(InvalidSpecError, match=f"'{name}' cannot be laid out"):
        autoshard.plan(
            nn.Linear(4, 4),
            Mesh({"data": 2}),
            example_inputs=(torch.ones(4, 4),),
            constraints={name: P(None, None, "data")},
        )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (P(None, "data"), r"P\(None, 'data'\) on Mesh\(data=2\): it has shape \(4, 1\)\. A dim"),
        (P(None, None, "data"), "splits 3 dims, but the tensor has ndim=2"),
    ],
)
def test_an_output_that_a_spec_cannot_split_is_described_by_its_own_shape(spec: P, words: str) -> None:
    """If a constraint cannot split an output, the error states the shape or number of dims of this output."""
    with pytest.raises(InvalidSpecError, match=words):
        autoshard.plan(
            nn.Linear(4, 1),
            Mesh({"data": 2}),
            example_inputs=(torch.ones(4, 4),),
            constraints={"output:0": spec},
        )


def test_no_pattern_matches_a_value_between_stages() -> None:
    """No pattern matches a value that one stage sends to another, nor the sum of squares of gradients."""
    program = step(alike(1))
    sent = InputSlot("received", InputKind.INPUT, crossing_name("blocks_relu", is_of_weights=False))
    squares = InputSlot("squares", InputKind.SQUARES, "squares:all")
    cut = replace(program, inputs=(*program.inputs, sent, squares))
    for pattern in ("*", "*blocks*", "*:*"):
        assert matching(cut, pattern) == matching(program, pattern)
    assert matching(cut, "*blocks*") == [name for name in matching(cut, "*") if name.startswith("blocks.")]


def test_a_pattern_without_a_colon_matches_no_optimizer_state_of_left_out_blocks() -> None:
    """Only a pattern with a colon matches optimizer state, also for a model that is planned without inner blocks."""
    model = alike(8)
    short = short_step(model, adamw(model))
    assert sorted(matching(short, "*up.weight")) == sorted(f"blocks.{number}.up.weight" for number in range(8))
    assert len(matching(short, "*:*up.weight")) == 2 * 8  # two moments
