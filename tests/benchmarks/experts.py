"""Mixtures of experts of the published runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts.

    Args:
        count: of experts; each token goes to `active` of them.
        ffn: hidden width of each.
        shared_ffn: of the expert that sees every token, 0 for none.
        dense_layers: blocks without experts, the first ones.
        biased: products of experts have biases, and their activation is clamped (gpt-oss; OpenAI 2025, model card).
    """

    count: int
    active: int
    ffn: int
    shared_ffn: int
    dense_layers: int
    biased: bool = False


class MixtureOfExperts(nn.Module):
    """Each token goes through `active` experts of `count`; routing is balanced, so that every expert sees as many."""

    def __init__(self, hidden: int, experts: Experts, shared: nn.Module | None) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(hidden, experts.count, bias=False)
        self.up = nn.Parameter(torch.empty(experts.count, hidden, 2 * experts.ffn))
        self.down = nn.Parameter(torch.empty(experts.count, experts.ffn, hidden))
        self.shared = shared
        if experts.biased:
            self.up_bias = nn.Parameter(torch.empty(experts.count, 1, 2 * experts.ffn))
            self.down_bias = nn.Parameter(torch.empty(experts.count, 1, hidden))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # [T, H]
        weights, chosen = self.router(tokens).softmax(-1).topk(self.experts.active)  # [T, K]
        order = chosen.flatten().argsort()
        sources = order // self.experts.active
        missing = -len(sources) % self.experts.count  # experts see as many tokens each, the last ones perhaps padding
        rows = tokens.index_select(0, F.pad(sources, (0, missing)) if missing else sources)  # [T * K, H], by expert
        grouped = rows.unflatten(0, (self.experts.count, -1))  # [E, T * K / E, H]
        inverse = order.argsort()
        if self.experts.biased:
            shares = weights.flatten().index_select(0, F.pad(order, (0, missing)) if missing else order)
            mixed = self._apart(self._biased(grouped, shares.view(self.experts.count, -1, 1)), inverse).sum(1)
        else:
            up, gate = torch.bmm(grouped, self.up).chunk(2, -1)
            done = torch.bmm(F.silu(gate) * up, self.down)
            mixed = (self._apart(done, inverse) * weights.unsqueeze(-1)).sum(1)
        mixed = mixed.view(x.shape)
        return mixed if self.shared is None else mixed + self.shared(x)

    def _apart(self, done: Tensor, inverse: Tensor) -> Tensor:
        """Results [E, T * K / E, H] by token and expert: [T, K, H]."""
        return done.flatten(0, 1).index_select(0, inverse).unflatten(0, (-1, self.experts.active))

    def _biased(self, grouped: Tensor, shares: Tensor) -> Tensor:
        """Experts with biases, weighed [E, T * K / E, 1] as Megatron-LM does: hidden units and last biases."""
        up, gate = torch.baddbmm(self.up_bias, grouped, self.up).chunk(2, -1)
        up, gate = up.clamp(-_LIMIT, _LIMIT), gate.clamp(max=_LIMIT)
        hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1) * shares
        return torch.bmm(hidden, self.down) + self.down_bias * shares


_LIMIT = 7.0
"""To which gpt-oss clamps the halves of a gated unit."""
