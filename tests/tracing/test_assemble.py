"""A joint graph becomes a program whose forward calls come before its backward calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.errors import TraceError
from autoshard.tracing import trace


class Overwrites(nn.Module):
    """A model that divides shares in place, as routers of experts do; the backward reads the old shares."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1).topk(2)[0]
        shares /= shares.sum(-1, keepdim=True)
        return (self.layer(x)[:, :2] * shares).sum()


def test_what_only_the_backward_reads_stands_behind_the_forward() -> None:
    """All forward calls come before all backward calls, because recomputation relies on this order."""
    program = trace(Overwrites(), (torch.randn(3, 4),))
    phases = [node.meta["phase"] for node in program.graph.nodes if node.op == "call_function"]
    assert set(phases) == {"forward", "backward"}
    assert phases == sorted(phases, reverse=True)


class Draws(nn.Module):
    """A model with a random operator whose draws depend on the layout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._fused_dropout.default(x, 0.5)[0] + x


def test_random_operators_without_a_form_are_refused() -> None:
    """A random operator whose numbers depend on the layout is refused, and the error names the model's line."""
    with pytest.raises(TraceError, match=r"random operator aten\..* at test_assemble\.py:"):
        trace(Draws(), (torch.randn(4),))
