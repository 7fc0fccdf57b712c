"""A model of one layer, with equal weights in every process that builds it."""

from __future__ import annotations

import torch
from torch import nn


class OneLayer(nn.Module):
    """A linear layer with fixed initial weights, which returns its mean square."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()
