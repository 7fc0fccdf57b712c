"""Uses of `dynamic_lengths` with masks of many forms, and with functions that have no gradient at padding."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import Options
from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers

WORDS, WIDTH = 12, 8

Weigh = Callable[[Tensor, Tensor], Tensor]
"""A function from scores and the mask of keys to masked scores."""

Shape = Callable[[Tensor, Tensor], Tensor]
"""A function from words [batch, length, width] and mask [batch, length, 1] to the input of the head."""


class Attending(nn.Module):
    """A tagger with attention written by hand."""

    def __init__(self, weigh: Weigh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weigh, self.words = weigh, nn.Embedding(WORDS, WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.mix(self.words(tokens)).chunk(3, -1)
        weights = self.weigh(query @ key.transpose(1, 2) / math.sqrt(WIDTH), mask).softmax(-1)
        return F.cross_entropy(self.out(weights @ value).flatten(0, 1), targets.flatten())


class Shaped(nn.Module):
    """A classifier of the sum of a masked function of words."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape, self.scale, self.head = shape, nn.Parameter(torch.ones(3)), nn.Linear(3, 4)

    def forward(self, x: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        shaped = self.shape(x * self.scale, mask[..., None])
        return F.cross_entropy(self.head(shaped.sum(1)), targets.sum(1))


def _losses_of(model: nn.Module, compile: Compile, make: Callable[[int], Tensor], *, ends: bool) -> Numbers:
    """Train on three lengths; return losses and parameters. With `ends`, some samples end early."""
    padding = {"tokens" if ends else "x": 0, "targets": -100 if ends else 0, "mask": 0}
    trained = compile(model, options=Options(dynamic_lengths=padding))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for length in (9, 10, 11):
        mask, targets = torch.ones(4, length), torch.zeros(4, length, dtype=torch.long)
        if ends:
            mask[0, -2:] = 0
            targets = torch.where(mask == 0, -100, 1)
        optimizer.zero_grad()
        loss = trained(make(length), targets, mask)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return numbers(*found, *model.parameters())


def _attends(weigh: Weigh) -> Callable[[Compile], Numbers]:
    def tokens(length: int) -> Tensor:
        return torch.randint(1, WORDS, (4, length), generator=torch.Generator().manual_seed(length))

    return lambda compile: _losses_of(Attending(weigh), compile, tokens, ends=True)


def _shapes(shape: Shape) -> Callable[[Compile], Numbers]:
    def x(length: int) -> Tensor:
        return torch.rand(4, length, 3, generator=torch.Generator().manual_seed(length)) + 0.5

    return lambda compile: _losses_of(Shaped(shape), compile, x, ends=False)


def _causal(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-1], scores.shape[-1], dtype=torch.bool).triu(1)


USES = (
    Use(
        "dynamic lengths: keys filled with -inf",
        _attends(lambda scores, mask: scores.masked_fill((mask == 0)[:, None], -math.inf)),
    ),
    Use(
        "dynamic lengths: one mask of keys and of later places",
        _attends(lambda scores, mask: scores.masked_fill((mask == 0)[:, None] | _causal(scores), -math.inf)),
    ),
    Use(
        "dynamic lengths: two masks that are added",
        _attends(
            lambda scores, mask: (
                scores
                + torch.zeros_like(scores[0]).masked_fill(_causal(scores), -math.inf)
                + torch.zeros_like(mask).masked_fill(mask == 0, -math.inf)[:, None]
            )
        ),
    ),
    Use(
        "dynamic lengths: pairs of places of which one is padding, at -1e9",
        _attends(lambda scores, mask: torch.where(mask[:, None] * mask[..., None] == 0, -1e9, scores)),
    ),
    Use("dynamic lengths: a logarithm that padding has not", _shapes(lambda x, m: x.log().masked_fill(m == 0, 0))),
    Use("dynamic lengths: a root, times the mask", _shapes(lambda x, m: x.abs().sqrt() * m)),
    Use("dynamic lengths: a quotient, chosen by the mask", _shapes(lambda x, m: torch.where(m != 0, 1 / x, 0))),
    Use("dynamic lengths: entropies, times the mask", _shapes(lambda x, m: torch.special.entr(x) * m)),
    Use("dynamic lengths: a norm without epsilon", _shapes(lambda x, m: F.layer_norm(x, (3,), eps=0.0) * m)),
    Use("dynamic lengths: directions with an epsilon", _shapes(lambda x, m: F.normalize(x, dim=-1) * m)),
)
