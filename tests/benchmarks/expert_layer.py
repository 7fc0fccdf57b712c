"""The layer of `tests.benchmarks.expert_worker` in its own module, because ranks send traced classes by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock


class Layer(nn.Module):
    """A product, an expert layer of Mixtral, and the mean square of the result."""

    def __init__(self, **config: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(config["hidden_size"], config["hidden_size"], bias=False)
        self.block = MixtralSparseMoeBlock(MixtralConfig(**config))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.before(x)).square().mean()
