"""A small model of one layer that every process of a test builds alike."""

from __future__ import annotations

import torch
from torch import nn


class OneLayer(nn.Module):
    """A layer and a loss; weights are equal wherever the model is built."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()
