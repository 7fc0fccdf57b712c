"""A decoder of configurable shape on meta, for the models of published runs.

The shape covers learned and rotary positions, grouped keys, gated and plain feed-forward, latent attention (MLA) and
mixtures of experts with balanced routing. It also covers sliding windows, tied embeddings, and attention with or
without a fused kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.benchmarks.experts import Experts, MixtureOfExperts


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1)."""

    q_rank: int
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """All fields on which the cost of a decoder depends.

    `mtp_layers`: extra blocks that predict a second token. `wide_logits`: the loss reads a copy of the logits in
    float32, not the head's own logits.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    gated: bool
    vocab: int
    sequence: int
    tied: bool
    learned_positions: bool
    norm_bias: bool
    bias: bool
    dropout: float
    fused_attention: bool
    window: int | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    mtp_layers: int = 0
    wide_logits: bool = True


class Decoder(nn.Module):
    """A decoder from tokens [B, S] and targets [B, S] to the mean cross-entropy."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden) if shape.learned_positions else None
        depth = shape.layers + shape.mtp_layers
        self.layers = nn.ModuleList(Block(shape, index) for index in range(depth))
        self.norm = _norm(shape, shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)  # [B, S, H]
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        if self.positions is not None:
            x = x + self.positions(steps)
        if self.shape.dropout:
            x = F.dropout(x, self.shape.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if self.shape.wide_logits:
            logits = logits.float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Block(nn.Module):
    """A block of attention and feed-forward, each after a norm and with a residual connection."""

    def __init__(self, shape: DecoderShape, index: int) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.attention_norm = _norm(shape, shape.hidden)
        window = shape.window if index % 2 == 0 else None
        self.attention = Attention(shape, window) if shape.latent is None else LatentAttention(shape, shape.latent)
        self.ffn_norm = _norm(shape, shape.hidden)
        experts = shape.experts
        if experts is not None and index >= experts.dense_layers:
            shared = FeedForward(shape, experts.shared_ffn) if experts.shared_ffn else None
            self.ffn: nn.Module = MixtureOfExperts(shape.hidden, experts, shared)
        else:
            self.ffn = FeedForward(shape, shape.ffn)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._dropped(self.attention(self.attention_norm(x)))
        return x + self._dropped(self.ffn(self.ffn_norm(x)))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Attention(nn.Module):
    """Multi-head attention with grouped keys."""

    def __init__(self, shape: DecoderShape, window: int | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = shape.heads, shape.kv_heads, shape.head_size
        self.rotary, self.fused, self.window = not shape.learned_positions, shape.fused_attention, window
        self.dropout = shape.dropout
        self.shared = self.heads // self.kv_heads
        width = self.kv_heads * (self.shared + 2) * self.size
        self.qkv = nn.Linear(shape.hidden, width, bias=shape.bias)  # by key head: its queries, key, value
        self.out = nn.Linear(self.heads * self.size, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.qkv(x).unflatten(-1, (self.kv_heads, self.shared + 2, self.size))
        q, k, v = mixed.split((self.shared, 1, 1), -2)  # [B, S, G, ., D]
        q, k, v = (item.flatten(2, 3).transpose(1, 2) for item in (q, k, v))  # [B, N, S, D]
        if self.rotary:
            q, k = _rotated(q), _rotated(k)
        if self.window is not None:
            y = _attend_near(q, k, v, self.window)
        else:
            y = _attend(q, k, v, fused=self.fused, dropout=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Attention whose queries, keys and values come out of low-rank projections. A part of each head is rotary."""

    def __init__(self, shape: DecoderShape, latent: Latent) -> None:
        super().__init__()
        self.heads, self.latent = shape.heads, latent
        self.q_down = nn.Linear(shape.hidden, latent.q_rank, bias=False)
        self.q_norm = _norm(shape, latent.q_rank)
        self.q_up = nn.Linear(latent.q_rank, self.heads * (latent.nope_size + latent.rope_size), bias=False)
        self.kv_down = nn.Linear(shape.hidden, latent.kv_rank + latent.rope_size, bias=False)
        self.kv_norm = _norm(shape, latent.kv_rank)
        self.kv_up = nn.Linear(latent.kv_rank, self.heads * (latent.nope_size + latent.value_size), bias=False)
        self.out = nn.Linear(self.heads * latent.value_size, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        sizes = self.latent
        q = self.q_up(self.q_norm(self.q_down(x)))
        q = q.unflatten(-1, (self.heads, sizes.nope_size + sizes.rope_size)).transpose(1, 2)  # [B, N, S, D]
        compressed, k_rope = self.kv_down(x).split((sizes.kv_rank, sizes.rope_size), -1)
        kv = self.kv_up(self.kv_norm(compressed)).unflatten(-1, (self.heads, sizes.nope_size + sizes.value_size))
        k_nope, v = kv.transpose(1, 2).split((sizes.nope_size, sizes.value_size), -1)
        q_nope, q_rope = q.split((sizes.nope_size, sizes.rope_size), -1)
        k_rope = _rotated(k_rope.unsqueeze(1)).expand(-1, self.heads, -1, -1)
        q = torch.cat((q_nope, _rotated(q_rope)), -1)
        k = torch.cat((k_nope, k_rope), -1)
        y = _attend(q, k, v, fused=True, dropout=0.0)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two products with GELU between, or three with a SiLU gate."""

    def __init__(self, shape: DecoderShape, width: int) -> None:
        super().__init__()
        self.gated = shape.gated
        self.up = nn.Linear(shape.hidden, width * (2 if shape.gated else 1), bias=shape.bias)
        self.down = nn.Linear(width, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        gate, up = self.up(x).unflatten(-1, (-1, 2)).unbind(-1)  # gate and value of a unit lie together
        return self.down(F.silu(gate) * up)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, fused: bool, dropout: float) -> Tensor:
    """Causal attention [B, N, S, D], as one operator or as products around a masked softmax."""
    if fused:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
    batch, heads, steps, _ = q.shape
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)) * q.shape[-1] ** -0.5
    future = torch.ones(steps, steps, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.unflatten(0, (batch, heads)).masked_fill(future, float("-inf")).softmax(-1)
    if dropout:
        weights = F.dropout(weights, dropout)
    return torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (batch, heads))


def _attend_near(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend to the last `window` steps, in pieces of this length: each piece sees itself and the previous piece.

    The pieces become part of the batch. The band is half of a piece's 2 * window keys, as in causal attention.
    """
    batch, heads, steps, size = q.shape
    pieces = steps // window

    def cut(x: Tensor) -> Tensor:
        return x.unflatten(2, (pieces, window)).transpose(1, 2).flatten(0, 1)  # [B * pieces, N, window, D]

    def with_past(x: Tensor) -> Tensor:
        return torch.cat((cut(x.roll(window, 2)), cut(x)), 2)

    y = _attend(cut(q), with_past(k), with_past(v), fused=True, dropout=0.0)
    return y.unflatten(0, (batch, pieces)).transpose(1, 2).reshape(batch, heads, steps, size)


def _rotated(x: Tensor) -> Tensor:
    """The rotary position embedding of [B, N, S, D] (Su et al. 2021), which pairs the two halves of D. In practice
    the tables are inputs."""
    half = x.shape[-1] // 2
    steps = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    frequency = torch.arange(half, device=x.device, dtype=torch.float32)
    angle = torch.outer(steps, frequency)
    table = torch.cat((angle, angle), -1)
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * table.cos().to(x.dtype) + turned * table.sin().to(x.dtype)


def _norm(shape: DecoderShape, width: int) -> nn.Module:
    return nn.LayerNorm(width) if shape.norm_bias else nn.RMSNorm(width)
