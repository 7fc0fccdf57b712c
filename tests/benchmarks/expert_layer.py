"""The layer of `tests.benchmarks.expert_worker`, apart, as ranks send what they trace by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock


class Layer(nn.Module):
    """A product, Mixtral's layer of experts behind it, and the mean square of what that gives."""

    def __init__(self, **config: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(config["hidden_size"], config["hidden_size"], bias=False)
        self.block = MixtralSparseMoeBlock(MixtralConfig(**config))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.before(x)).square().mean()
