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
