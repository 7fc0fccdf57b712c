"""Constraints are met, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard import InvalidSpecError, Mesh, P


@pytest.mark.parametrize("name", ["weight", "input:0", "output:0"])
def test_a_spec_of_more_dims_than_there_are_is_refused(name: str) -> None:
    """A parameter, an input and an output of two dims have no third."""
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
    """The last dim of the output has one element, so no strategy splits it."""
    with pytest.raises(InvalidSpecError, match=words):
        autoshard.plan(
            nn.Linear(4, 1),
            Mesh({"data": 2}),
            example_inputs=(torch.ones(4, 4),),
            constraints={"output:0": spec},
        )
