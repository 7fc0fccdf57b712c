"""Errors of the cost models reach users as autoshard's own errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard import AutoshardError, Cluster, NotAvailableError, Recipe, UnknownHardwareError
from autoshard.ir.cost_errors import errors_of_ours
from cost_models import errors


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (errors.UnknownHardwareError, UnknownHardwareError),
        (errors.HardwareFileError, UnknownHardwareError),
        (errors.TopologyError, UnknownHardwareError),
        (errors.CostArgumentError, NotAvailableError),
        (errors.UnknownOperatorError, NotAvailableError),
    ],
)
def test_each_class_becomes_one_of_ours(raised: type[Exception], seen: type[Exception]) -> None:
    """Each class of error becomes an error of autoshard with the same message, and is its cause."""
    with pytest.raises(seen, match="the words") as caught, errors_of_ours():
        raise raised("the words")
    assert isinstance(caught.value, AutoshardError)
    assert type(caught.value.__cause__) is raised


def test_a_price_that_needs_an_unknown_link() -> None:
    """A CPU has no link to a host, so offloading to the host has no price."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)
    cluster, recipe = Cluster("cpu_laptop", 1, 1), Recipe(offload="activations")
    with pytest.raises(UnknownHardwareError, match="no host_link"):
        autoshard.price(model, cluster, recipe, example_inputs=(torch.zeros(1, 4, 16),), loss_fn=lambda y: y.sum())
