"""Mixtures of experts as in the published runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts.

    Args:
        count: number of experts; each token goes to `active` of them.
        ffn: hidden width of each expert.
        shared_ffn: width of the expert that sees every token, 0 for none.
        dense_layers: first blocks, without experts.
        biased: products of experts have biases, and their activation is clamped (gpt-oss; OpenAI 2025, model card).
            Megatron-LM runs `bias` and `clamp` as modules of their own.
    """

    count: int
    active: int
    ffn: int
    shared_ffn: int
    dense_layers: int
    biased: bool = False


class MixtureOfExperts(nn.Module):
    """Each token goes through `active` of `count` experts under balanced routing."""

    def __init__(self, hidden: int, experts: Experts, shared: nn.Module | None) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(hidden, experts.count, bias=False)
        self.up = nn.Parameter(torch.empty(experts.count, hidden, 2 * experts.ffn))
        self.down = nn.Parameter(torch.empty(experts.count, experts.ffn, hidden))
        self.shared = shared
        self.act = ClampedUnit() if experts.biased else GatedUnit()
        if experts.biased:
            self.up_bias = nn.Parameter(torch.empty(experts.count, 1, 2 * experts.ffn))
            self.down_bias = nn.Parameter(torch.empty(experts.count, 1, hidden))
            self.bias = SharedBias()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # [T, H]
        weights, chosen = self.router(tokens).softmax(-1).topk(self.experts.active)  # [T, K]
        order = chosen.flatten().argsort()
        sources = order // self.experts.active
        missing = -len(sources) % self.experts.count  # experts see as many tokens each, the last ones perhaps padding
        rows = tokens.index_select(0, F.pad(sources, (0, missing)) if missing else sources)  # [T * K, H], by expert
        grouped = rows.unflatten(0, (self.experts.count, -1))  # [E, T * K / E, H]
        inverse = order.argsort()
        shares = weights.flatten().index_select(0, F.pad(order, (0, missing)) if missing else order)
        done = self._run(grouped, shares.view(self.experts.count, -1, 1))
        mixed = self._apart(done, inverse).sum(1).view(x.shape)
        return mixed if self.shared is None else mixed + self.shared(x)

    def _apart(self, done: Tensor, inverse: Tensor) -> Tensor:
        """Results [E, T * K / E, H] of experts, reordered by token and chosen expert: [T, K, H]."""
        return done.flatten(0, 1).index_select(0, inverse).unflatten(0, (-1, self.experts.active))

    def _run(self, grouped: Tensor, shares: Tensor) -> Tensor:
        """The results of the experts, whose hidden units and last biases are multiplied by shares [E, T * K / E,
        1] as in Megatron-LM."""
        if not self.experts.biased:
            return torch.bmm(self.act(torch.bmm(grouped, self.up), shares), self.down)
        hidden = self.act(torch.baddbmm(self.up_bias, grouped, self.up), shares)
        return self.bias(torch.bmm(hidden, self.down), self.down_bias, shares)


class GatedUnit(nn.Module):
    """A gated unit: one half of [..., 2 * F] times SiLU of the second half, weighted, to [..., F]."""

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        up, gate = x.chunk(2, -1)
        return F.silu(gate) * up * shares


class ClampedUnit(nn.Module):
    """The weighted gated unit of gpt-oss, with clamped halves."""

    def __init__(self) -> None:
        super().__init__()
        self.clamp = Clamp()

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        up, gate = self.clamp(x).chunk(2, -1)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1) * shares


class Clamp(nn.Module):
    """The halves of gated units [..., 2 * F], clamped and joined (Megatron-LM's weighted_bias_quick_geglu_impl)."""

    def forward(self, x: Tensor) -> Tensor:
        up, gate = x.chunk(2, -1)
        return torch.cat((up.clamp(-_LIMIT, _LIMIT), gate.clamp(max=_LIMIT)), -1)


class SharedBias(nn.Module):
    """Add biases of experts [E, 1, H], weighted by [E, T, 1], to results of experts [E, T, H].

    Megatron-LM adds biases expert by expert and joins the results (`TEGroupedMLP._apply_bias`); two halves move as many
    bytes.
    """

    def forward(self, x: Tensor, bias: Tensor, shares: Tensor) -> Tensor:
        return torch.cat((x + bias * shares).chunk(2, 1), 1)


_LIMIT = 7.0
"""To which gpt-oss clamps the halves of a gated unit."""
