"""Eleven families of models in float64, each as small as its kind allows.

Each builder of `FAMILIES` returns a model and the arguments of a call, which returns the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 4, 4, 8, 2, 16

Built = tuple[nn.Module, tuple[Tensor, ...]]


def tokens(seed: int = 1, length: int = LENGTH) -> Tensor:
    """Random token ids of shape [BATCH, length]."""
    return torch.randint(0, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def language_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over the vocabulary; token 0 is ignored."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)


def _heads(x: Tensor, count: int = HEADS) -> Tensor:
    """Reshape [B, T, heads * size] to [B, heads, T, size]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Attention of `x` to `memory`, or to `x` itself if `memory` is None."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        k, v = self.kv(x if memory is None else memory).chunk(2, -1)
        q, k, v = map(_heads, (self.q(x), k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    """The feed-forward part of a transformer block: two linear layers with GELU in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """A decoder with dropout and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.first, self.second, self.last = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention, self.feed = Attention(dropout=0.1), Feed()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.embed(x) + self.position(torch.arange(LENGTH))
        h = h + F.dropout(self.attention(self.first(h), causal=True), 0.1)
        h = h + self.feed(self.second(h))
        return language_loss(F.linear(self.last(h), self.embed.weight), target)


class Llama(nn.Module):
    """A decoder with rotary positions, shared keys, RMS norms and a gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.first, self.second = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, 4, 4, WIDTH))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        angles = torch.outer(torch.arange(LENGTH), torch.tensor([1.0, 0.1]))
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def _rotate(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * self.cos + torch.cat([-right, left], -1) * self.sin

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.embed(x)
        y = self.first(h)
        q, k, v = self._rotate(_heads(self.q(y))), self._rotate(_heads(self.k(y), 1)), _heads(self.v(y), 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = h + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.second(h)
        return language_loss(self.head(h + self.down(F.silu(self.gate(y)) * self.up(y))), target)


class Mixture(nn.Module):
    """A router with the top two of four experts per token, and a balancing loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.norm, self.router = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Parameter(torch.empty(4, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.empty(4, 2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.embed(x)
        flat = self.norm(h).flatten(0, 1)
        shares = self.router(flat).softmax(-1)
        weights, chosen = shares.topk(2)
        gates = torch.zeros_like(shares).scatter(1, chosen, weights / weights.sum(-1, keepdim=True))
        done = torch.einsum("neh,ehd->ned", F.silu(torch.einsum("nd,edh->neh", flat, self.up)), self.down)
        h = h + (gates.unsqueeze(-1) * done).sum(1).view_as(h)
        balance = 4 * (shares.mean(0) * F.one_hot(chosen[:, 0], 4).to(shares.dtype).mean(0)).sum()
        return language_loss(self.head(h), target) + 0.1 * balance


class Bert(nn.Module):
    """An encoder with a padding mask, segment embeddings and norms behind the residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.segment = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), nn.Embedding(2, WIDTH)
        self.attention, self.feed = Attention(), Feed()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.embed(x) + self.segment((torch.arange(LENGTH) >= 2).long())
        mask = (x != 3)[:, None, None, :]
        h = self.first(h + F.dropout(self.attention(h, mask=mask), 0.2))
        return language_loss(self.head(self.second(h + self.feed(h))), target)


class VisionTransformer(nn.Module):
    """Patches by a convolution, a class token, positions, one block."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.empty(1, 1, WIDTH))
        self.position = nn.Parameter(torch.empty(1, 5, WIDTH))
        self.norm, self.attention, self.feed = nn.LayerNorm(WIDTH), Attention(), Feed()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        h = self.patches(images).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(BATCH, -1, -1), h], 1) + self.position
        h = h + self.attention(self.norm(h))
        return F.cross_entropy(self.head((h + self.feed(h))[:, 0]), target)


class EncoderDecoder(nn.Module):
    """An encoder and a cross-attending decoder with relative positions and shared embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.relative = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2 * LENGTH, HEADS)
        self.encoder, self.own, self.cross, self.feed = Attention(), Attention(), Attention(), Feed()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        place = torch.arange(LENGTH)
        bias = self.relative(place[:, None] - place[None, :] + LENGTH).permute(2, 0, 1).unsqueeze(0)
        memory = self.embed(source)
        memory = memory + self.encoder(self.norm(memory), mask=bias)
        h = self.embed(target.roll(1, 1))
        h = h + self.own(h, causal=True)
        h = h + self.cross(h, memory)
        return language_loss((h + self.feed(h)) @ self.embed.weight.t(), target)


class UNet(nn.Module):
    """A strided convolution and an upsampling with a skip connection, batch and group norms, and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.leave = nn.Conv2d(12, 2, 3, padding=1)
        self.batch, self.group = nn.BatchNorm2d(4), nn.GroupNorm(2, 8)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        wide = F.relu(self.batch(self.enter(images)))
        deep = F.silu(self.group(self.inner(wide)))
        both = torch.cat([F.interpolate(deep, scale_factor=2, mode="nearest"), wide], 1)
        return F.mse_loss(F.avg_pool2d(self.leave(both), 2), target)


class Recurrent(nn.Module):
    """A recurrent layer between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCABULARY, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return language_loss(self.head(self.lstm(self.embed(x))[0]), target)


class StateSpace(nn.Module):
    """A selective scan, computed step by step, behind a causal convolution over the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.enter = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 2, padding=1, groups=WIDTH)
        self.select = nn.Linear(WIDTH, WIDTH + 4)
        self.decay, self.skip = nn.Parameter(torch.empty(WIDTH, 2)), nn.Parameter(torch.empty(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h, gate = self.enter(self.embed(x)).chunk(2, -1)
        h = F.silu(self.mix(h.transpose(1, 2))[..., :LENGTH].transpose(1, 2))
        step, write, read = self.select(h).split([WIDTH, 2, 2], -1)
        step = F.softplus(step)
        keep = torch.exp(-step.unsqueeze(-1) * self.decay.exp())
        state, outputs = torch.zeros_like(keep[:, 0]), []
        for t in range(LENGTH):
            state = keep[:, t] * state + (step[:, t] * h[:, t]).unsqueeze(-1) * write[:, t].unsqueeze(1)
            outputs.append((state * read[:, t].unsqueeze(1)).sum(-1))
        return language_loss(self.head((torch.stack(outputs, 1) + self.skip * h) * F.silu(gate)), target)


class Recommender(nn.Module):
    """Lookups in two embedding tables; pairwise products of the found rows join the dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.bottom, self.top = nn.Linear(6, WIDTH), nn.Linear(WIDTH + 6, 1)

    def forward(self, dense: Tensor, sparse: Tensor, target: Tensor) -> Tensor:
        bottom = F.relu(self.bottom(dense))
        found = [self.shared(sparse[:, 0]), self.shared(sparse[:, 1]), self.other(sparse[:, 2:]).sum(1)]
        features = torch.stack([bottom, *found], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tensor([1, 2, 2, 3, 3, 3]), torch.tensor([0, 0, 1, 0, 1, 2])
        scores = self.top(torch.cat([bottom, products[:, rows, columns]], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(scores, target)


class Graph(nn.Module):
    """Two rounds of messages along edges. Targets add up the messages of round one, and average those of round two."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edges: Tensor, target: Tensor) -> Tensor:
        source, goal = edges
        sent = F.relu(self.message(x)).index_select(0, source)
        h = F.relu(self.own(x) + torch.zeros_like(x).index_add(0, goal, sent))
        counts = x.new_ones(len(x)).scatter_add(0, goal, x.new_ones(edges.shape[1])).clamp(min=1)
        h = torch.zeros_like(h).scatter_add(0, goal[:, None].expand(-1, WIDTH), h[source]) / counts[:, None] + h
        return F.nll_loss(F.log_softmax(self.head(h), 1), target)


def _text(make: Callable[[], nn.Module]) -> Callable[[], Built]:
    return lambda: (make().double(), (tokens(1), tokens(2)))


def _images(make: Callable[[], nn.Module], channels: int) -> Callable[[], tuple[nn.Module, Tensor]]:
    return lambda: (make().double(), torch.randn(BATCH, channels, 8, 8, dtype=torch.float64))


def _vision() -> Built:
    model, images = _images(VisionTransformer, 3)()
    return model, (images, torch.arange(BATCH))


def _unet() -> Built:
    model, images = _images(UNet, 2)()
    return model, (images, torch.randn(BATCH, 2, 4, 4, dtype=torch.float64))


def _recommender() -> Built:
    dense, clicks = torch.randn(8, 6, dtype=torch.float64), torch.arange(8, dtype=torch.float64) % 2
    return Recommender().double(), (dense, torch.cat([tokens(1), tokens(2)]), clicks)


def _graph() -> Built:
    edges = torch.cat([tokens(1, 8), tokens(2, 8)]).view(2, -1)
    return Graph().double(), (torch.randn(VOCABULARY, WIDTH, dtype=torch.float64), edges, torch.arange(VOCABULARY) % 4)


FAMILIES: dict[str, Callable[[], Built]] = {
    "gpt": _text(GPT), "llama": _text(Llama), "mixture": _text(Mixture), "bert": _text(Bert), "vit": _vision,
    "encoder-decoder": _text(EncoderDecoder), "unet": _unet, "lstm": _text(Recurrent),
    "state-space": _text(StateSpace), "recommender": _recommender, "graph": _graph,
}  # fmt: skip
"""The builder of each family by name. Builders draw from torch's global generator, so seed torch first."""
