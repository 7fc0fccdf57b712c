"""Each call of a step has a stage. Values flow to later stages, and gradients to earlier stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.tracing import trace
from passes.preparation.split_stages import SplitStages


class Scan(nn.Module):
    """A state-space layer as a loop over time steps, each of which reads a slice of values from before the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.step, self.leave = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.rate = nn.Parameter(torch.rand(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        u = self.enter(x)
        step = nn.functional.softplus(self.step(u))
        keep, add = torch.exp(step[..., None] * -self.rate), (step * u)[..., None]
        state, found = torch.zeros(len(x), 8, 4), []
        for time in range(x.shape[1]):
            state = keep[:, time] * state + add[:, time]
            found.append(state.sum(-1))
        return self.leave(torch.stack(found, 1) + u).square().mean()


class Recurrent(nn.Module):
    """A recurrent cell that reads all results of an encoder at each time step."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.cell = nn.Linear(6, 8), nn.GRUCell(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        read = self.enter(x)
        state, loss = read[:, 0], torch.zeros(())
        for time in range(x.shape[1]):
            weights = torch.softmax((read @ state[..., None]).squeeze(-1), -1)
            state = self.cell(torch.cat([read[:, time], (weights[:, None] @ read).squeeze(1)], -1), state)
            loss = loss + state.square().mean()
        return loss


@pytest.mark.parametrize("model", [Scan(), Recurrent()], ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("stages", [2, 3])
def test_a_loop_is_cut_between_two_times(model: nn.Module, stages: int) -> None:
    """Forward values cross only to later stages and gradients only to earlier stages, also if a loop is cut."""
    cut = SplitStages(stages, lambda node: 1.0)(trace(model, (torch.randn(4, 5, 6),), {}))
    assert all(item.is_forward == (item.maker < item.reader) for item in cut.crossings)
    assert any(not item.is_forward for item in cut.crossings)
