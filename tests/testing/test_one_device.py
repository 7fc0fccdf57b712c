"""A traced program runs on one device, even if kernels lay results out in another way than the trace."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.testing.one_device import OneDevice
from autoshard.tracing import trace


def test_a_view_of_what_a_kernel_laid_out_otherwise_is_a_reshape() -> None:
    """The program runs where batch norm's result has other strides on the CPU than in the trace, and gives the
    model's result."""
    torch.manual_seed(0)
    norm, linear = nn.BatchNorm1d(8, affine=False, track_running_stats=False), nn.Linear(8, 8, bias=False)

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = norm, linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2))

    model, x = Normed(), torch.randn(4, 4, 8)
    program = trace(model, (x,), grad=False)
    (found,) = OneDevice(program.graph_module).run(linear.weight, x)
    assert torch.equal(found, model(x))
