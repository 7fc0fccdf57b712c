"""Small decoders for the tests of recipes, with their folded programs and priced models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from autoshard import Runtime, tracing
from passes.search.layers.fold_program import FoldedProgram, fold_program
from passes.search.layers.price_model import PricedModel

PRICED = Runtime(name="as recipes say")
"""A runtime that runs every field of a recipe as given, so that plans under the runtime are only prices."""

SEQUENCE, HIDDEN, VOCAB = 32, 64, 96


class Layer(nn.Module):
    """A decoder layer of causal attention and feed-forward; one product computes queries, keys and values."""

    def __init__(self, heads: int = 4, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.heads = heads
        self.one, self.two = norm(HIDDEN), norm(HIDDEN)
        self.mixed, self.back = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.wide, self.narrow = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mixed(self.one(x)).unflatten(-1, (self.heads, 3, -1)).unbind(-2)
        q, k, v = (item.transpose(1, 2) for item in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.back(y.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.two(x))))


class Experts(nn.Module):
    """A residual layer of four experts. Each token is sent to two experts, and each expert takes equally many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4, bias=False)
        self.up = nn.Parameter(torch.empty(4, HIDDEN, 2 * HIDDEN))
        self.down = nn.Parameter(torch.empty(4, 2 * HIDDEN, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        rows = tokens.index_select(0, order // 2).unflatten(0, (4, -1))
        done = torch.bmm(torch.bmm(rows, self.up).relu(), self.down).flatten(0, 1)
        back = done.index_select(0, order.argsort()).unflatten(0, (-1, 2))
        return x + (back * weights.unsqueeze(-1)).sum(1).view(x.shape)


class Decoder(nn.Module):
    """A language model with the given layers and a head tied to the embedding; its result is the loss."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.layers = nn.ModuleList(layers)
        self.last = nn.LayerNorm(HIDDEN)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.last(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def dense(depth: int = 5, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> Decoder:
    """A bfloat16 decoder of `depth` dense layers on the meta device."""
    with torch.device("meta"):
        return Decoder([Layer(norm=norm) for _ in range(depth)]).bfloat16()


def sparse() -> Decoder:
    """A bfloat16 decoder on the meta device, with six layers that are `Layer` and `Experts` in turn."""
    with torch.device("meta"):
        return Decoder([Layer() if index % 2 == 0 else Experts() for index in range(6)]).bfloat16()


def tokens(batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets on the meta device, both of shape [batch, SEQUENCE]."""
    one = torch.zeros(batch, SEQUENCE, dtype=torch.int64, device="meta")
    return one, one


def folded(model: nn.Module) -> FoldedProgram:
    """The folded program of a model, made from traces with batches of two and of three."""
    short = tracing.shorten(model)
    double, triple = (tracing.trace(short.model, tokens(batch), {}) for batch in (2, 3))
    return fold_program(double, triple, short.lists)


@cache
def priced_dense(depth: int = 5) -> PricedModel:
    """Return the priced model of `dense(depth)`; tests share the model, because tracing is slow."""
    return PricedModel(folded(dense(depth)))


@cache
def priced_sparse() -> PricedModel:
    """The priced model of `sparse()`, cached for all tests."""
    return PricedModel(folded(sparse()))
