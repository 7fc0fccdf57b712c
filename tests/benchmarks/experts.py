"""Mixtures of experts of the published runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts; `shared_ffn` is the width of the expert that sees every token, 0 for none."""

    count: int
    active: int
    ffn: int
    shared_ffn: int
    dense_layers: int


class MixtureOfExperts(nn.Module):
    """Each token goes through `active` experts of `count`; routing is balanced, so that every expert sees as many."""

    def __init__(self, hidden: int, experts: Experts, shared: nn.Module | None) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(hidden, experts.count, bias=False)
        self.up = nn.Parameter(torch.empty(experts.count, hidden, 2 * experts.ffn))
        self.down = nn.Parameter(torch.empty(experts.count, experts.ffn, hidden))
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # [T, H]
        weights, chosen = self.router(tokens).softmax(-1).topk(self.experts.active)  # [T, K]
        order = chosen.flatten().argsort()
        sources = order // self.experts.active
        missing = -len(sources) % self.experts.count  # experts see as many tokens each, the last ones perhaps padding
        rows = tokens.index_select(0, F.pad(sources, (0, missing)) if missing else sources)  # [T * K, H], by expert
        grouped = rows.unflatten(0, (self.experts.count, -1))  # [E, T * K / E, H]
        up, gate = torch.bmm(grouped, self.up).chunk(2, -1)
        done = torch.bmm(F.silu(gate) * up, self.down).flatten(0, 1)
        back = done.index_select(0, order.argsort()).unflatten(0, (-1, self.experts.active))  # [T, K, H]
        mixed = (back * weights.unsqueeze(-1)).sum(1).view(x.shape)
        return mixed if self.shared is None else mixed + self.shared(x)
