"""Trust: what was compiled can be verified again, and kernels can stand in without changing it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh


class Small(nn.Module):
    """A norm and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x)))).square().mean()


def test_a_compiled_model_verifies() -> None:
    """The report counts nodes and names the rules it rests on; a training step verifies too."""
    sharded = autoshard.compile(Small(), Mesh({"x": 2}), example_inputs=(torch.randn(4, 8),))
    report = autoshard.verify(sharded)
    assert report.nodes > 10
    assert "aten.mm.default" in report.rules
    assert not report.assumptions
    model = Small()
    step = autoshard.compile(model, Mesh({"x": 2}), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    step(torch.randn(4, 8))
    assert autoshard.verify(step).nodes > 10


def test_nothing_compiled_cannot_be_verified() -> None:
    """The message says to call the model first."""
    with pytest.raises(autoshard.TraceError, match="nothing has been compiled yet; call the model once"):
        autoshard.verify(autoshard.compile(Small(), Mesh({"x": 2})))


def test_kernels_in_the_interpreter_equal_references() -> None:
    """Loss and gradients with backend="triton" are those of backend="auto"."""
    torch.manual_seed(0)
    model, x = Small(), torch.randn(4, 8)
    losses, gradients = [], []
    for backend in ("auto", "triton"):
        sharded = autoshard.compile(model, Mesh({"x": 2}), backend=backend)
        loss = sharded(x)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_an_unknown_cluster_is_an_error_of_this_package() -> None:
    """The message names what is known."""
    with pytest.raises(autoshard.UnknownHardwareError, match="h100_sxm"):
        autoshard.Cluster("h100_sxn")
