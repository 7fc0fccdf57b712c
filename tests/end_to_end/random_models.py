"""Models that draw random numbers in `forward`; one model applies all random operators of a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Draws = Mapping[str, Callable[[Tensor], Tensor]]

FRESH: Draws = {
    "rand": lambda h: h * torch.rand(h.shape),
    "rand_like": lambda h: h + torch.rand_like(h),
    "rand(out=)": lambda h: h + torch.rand(h.shape, out=torch.empty(h.shape)),
    "rand, float64": lambda h: h + torch.rand(h.shape[1], dtype=torch.float64),
    "rand, bfloat16": lambda h: h + torch.rand(h.shape, dtype=torch.bfloat16),
    "randn": lambda h: h + torch.randn(h.shape[1]),
    "randn, complex": lambda h: h + torch.randn(h.shape, dtype=torch.complex64).imag,
    "randn_like": lambda h: h + torch.randn_like(h),
    "randn_like, float16": lambda h: h + torch.randn_like(h, dtype=torch.float16),
    "randn_like, transposed": lambda h: h + torch.randn_like(h.t()).t(),
    "randint": lambda h: h * torch.randint(1, 7, (h.shape[0], 1)),
    "randint_like": lambda h: h + torch.randint_like(h, 9),
    "randint_like below a tensor": lambda h: h + torch.randint_like(h, torch.tensor(9)),
    "randperm": lambda h: h * torch.randperm(h.shape[1]),
    "normal of numbers": lambda h: h + torch.normal(1.0, 2.0, h.shape),
}

IN_PLACE: Draws = {
    "normal_": lambda h: h + torch.empty_like(h).normal_(1.0, 2.0),
    "uniform_": lambda h: h + torch.empty(h.shape).uniform_(-1.0, 1.0),
    "uniform_ of a view": lambda h: h + _row_filled(torch.zeros_like(h)),
    "exponential_": lambda h: h + torch.empty_like(h).exponential_(2.0),
    "log_normal_": lambda h: h + torch.empty_like(h).log_normal_(0.0, 0.5),
    "geometric_": lambda h: h + torch.empty_like(h).geometric_(0.3),
    "cauchy_": lambda h: h + torch.empty_like(h).cauchy_(sigma=0.1),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.4),
    "bernoulli_ of a tensor": lambda h: h * torch.empty_like(h).bernoulli_(h.detach().sigmoid()),
    "bernoulli_, bool": lambda h: h * torch.empty(h.shape, dtype=torch.bool).bernoulli_(),
    "random_": lambda h: h + torch.empty(h.shape, dtype=torch.uint8).random_(),
    "random_ to": lambda h: h + torch.empty(h.shape, dtype=torch.int64).random_(5),
    "random_ from, to": lambda h: h + torch.empty(h.shape).random_(2, 9),
}

OF_VALUES: Draws = {
    "bernoulli": lambda h: h * torch.bernoulli(h.sigmoid()),
    "bernoulli p": lambda h: h * torch.bernoulli(h.detach(), 0.7),
    "normal of tensors": lambda h: h * torch.normal(h, h.exp()),
    "normal of a mean": lambda h: h * torch.normal(h, 2.0),
    "normal of a deviation": lambda h: h * torch.normal(0.5, h.exp()),
    "poisson": lambda h: h * torch.poisson(h.exp() * 4.0),
    "binomial": lambda h: h * torch.binomial(torch.full_like(h, 9.0), h.detach().sigmoid()),
    "gamma": lambda h: torch._standard_gamma(h.exp()),
    "dirichlet": lambda h: torch.distributions.Dirichlet(h.exp(), validate_args=False).rsample(),
    "multinomial": lambda h: h * torch.multinomial(h.softmax(-1), 1),
    "multinomial, several": lambda h: h * torch.multinomial(h.softmax(-1), h.shape[1]),
    "multinomial, with replacement": lambda h: h * torch.multinomial(h.softmax(-1), h.shape[1], replacement=True),
    "rows in another order": lambda h: h[torch.randperm(h.shape[0])],
}

LAYERS: Draws = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "native_dropout": lambda h: torch.native_dropout(h, 0.3, True)[0],
    "dropout1d": lambda h: F.dropout1d(h.unsqueeze(-1), 0.3),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "feature_alpha_dropout": lambda h: F.feature_alpha_dropout(h.unsqueeze(-1), 0.3, training=True),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "rrelu_": lambda h: F.rrelu_(h * 1.0, training=True),
    "rrelu in evaluation": lambda h: F.rrelu(h),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h),
    "gumbel_softmax, hard": lambda h: F.gumbel_softmax(h, hard=True),
    "fractional max pool": lambda h: F.fractional_max_pool2d(h[:, None, None].expand(-1, 1, 6, -1), 2, output_size=2),
    "drop path": lambda h: h.div(0.9) * (0.9 + torch.rand(h.shape[0], 1)).floor(),
}

FAMILIES: Mapping[str, Draws] = MappingProxyType(
    {"fresh": FRESH, "in place": IN_PLACE, "of values": OF_VALUES, "layers": LAYERS}
)


class Drawing(nn.Module):
    """A module that applies each of several random operators to its scaled input."""

    def __init__(self, draws: Draws, width: int) -> None:
        super().__init__()
        self.draws = tuple(draws.values())
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the result of each operator; x has shape [rows, width]."""
        return tuple(draw(x * self.scale) for draw in self.draws)


def _row_filled(x: Tensor) -> Tensor:
    x[1].uniform_()
    return x
