"""One line runs a model on four ranks, here in one process, with the results of one device."""

import copy

import torch
from torch import nn

import autoshard


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 16))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(features), labels)


model = Classifier()
features, labels = torch.randn(32, 64), torch.randint(0, 16, (32,))
sharded = autoshard.compile(copy.deepcopy(model), autoshard.Mesh({"data": 2, "model": 2}))
for name, network in (("one device", model), ("four ranks", sharded)):
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for _step in range(3):
        (loss := network(features, labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{name}: loss {loss.item():.6f}")
