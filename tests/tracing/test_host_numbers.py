"""Numbers from Python's or NumPy's generators are refused if results depend on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoshard.errors import TraceError
from autoshard.tracing import trace

_draw_by_another_name = random.random
_Generator = random.Random
_make_by_another_name = np.random.default_rng
_of_this_file = np.random.default_rng(0)


class Draws(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.linear(x)).square().mean()


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask of numpy": lambda h: h * torch.from_numpy(np.random.rand(4) < 0.5),
    "places of numpy": lambda h: h[torch.from_numpy(np.random.permutation(8)[:4])],
    "a rare layer drop": lambda h: h if random.random() < 0.01 else 2 * h,
    "a layer drop of numpy": lambda h: h if np.random.uniform(0, 1) < 0.01 else 2 * h,
    "a rare integer": lambda h: h if random.randint(0, 30) < 30 else 2 * h,
    "a rare integer of numpy": lambda h: 2 * h if np.random.randint(40) else h,
    "a rare number by another name": lambda h: h if _draw_by_another_name() < 0.01 else 2 * h,
    "a rare number of a distribution": lambda h: h if np.random.binomial(1, 0.01) else 2 * h,
    "a number": lambda h: h * random.uniform(0.9, 1.1),
    "a rare number of a new generator": lambda h: h if np.random.default_rng().random() < 0.01 else 2 * h,
    "a rare number of a new generator of Python": lambda h: h if random.Random().random() < 0.01 else 2 * h,
    "a number of a new generator of Python by another name": lambda h: h * _Generator(None).uniform(0.9, 1.1),
    "a rare integer of a new old generator": lambda h: 2 * h if np.random.RandomState().randint(40) else h,
    "a number of a new generator by another name": lambda h: h * _make_by_another_name().beta(0.2, 0.2),
    "a rare number of a generator of the file": lambda h: h if _of_this_file.random() < 0.01 else 2 * h,
}


class Keeps(nn.Module):
    """A model that draws from its own generator."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.linear, self.generator, self.p = nn.Linear(4, 4), generator, 0.01

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return (h if self.generator.random() < self.p else 2 * h).square().mean()


def own_generators() -> tuple[Any, ...]:
    return np.random.default_rng(0), np.random.RandomState(0), random.Random(0)


@pytest.mark.parametrize("generator", own_generators(), ids=lambda generator: type(generator).__name__)
def test_numbers_of_own_generators_are_refused(generator: Any) -> None:
    """Numbers from a model's own generator are refused, even if they rarely matter. If they never matter, they may be
    drawn."""
    model = Keeps(generator)
    with pytest.raises(TraceError, match="draws from a generator of its own in forward"):
        trace(model, (torch.randn(8, 4),))
    assert model.generator is generator
    model.p = 0.0
    trace(model, (torch.randn(8, 4),))


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random])
def test_numbers_of_a_seed_are_let_pass(make: Any) -> None:
    """A generator that each call makes anew with the same seed is allowed."""
    trace(Draws(lambda h: h * make(3).uniform(0, 1)), (torch.randn(8, 4),))


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_of_other_generators_are_refused(name: str) -> None:
    """Numbers that change a result are refused, even if they rarely do, and the generators work afterwards."""
    with pytest.raises(TraceError, match=r"Draws computes with numbers that it draws from .* in forward.*torch\.rand"):
        trace(Draws(DRAWS[name]), (torch.randn(8, 4),))
    assert len({random.random() for _ in range(3)}) == len({np.random.rand() for _ in range(3)}) == 3


def test_the_line_that_draws_is_named() -> None:
    """The error names the line of the user's file that draws."""
    with pytest.raises(TraceError, match=r"numpy\.random in forward \(test_host_numbers\.py:\d+ in"):
        trace(Draws(DRAWS["a layer drop of numpy"]), (torch.randn(8, 4),))


def test_numbers_that_do_not_matter_are_let_pass() -> None:
    """A layer drop of probability zero is traced, because its numbers change nothing."""
    trace(Draws(lambda h: 2 * h if random.uniform(0, 1) < 0.0 else h), (torch.randn(8, 4),))


def test_generators_keep_their_states() -> None:
    """A trace advances Python's and NumPy's global generators by the draws of one call."""

    def draw(h: Tensor) -> Tensor:
        drawn.append((random.random(), random.choice(range(100)), np.random.randint(100), np.random.randn()))
        return h

    drawn: list[tuple[float, ...]] = []
    random.seed(3), np.random.seed(3)
    trace(Draws(draw), (torch.randn(8, 4),))
    after = random.random(), np.random.rand()
    random.seed(3), np.random.seed(3)
    for _ in range(len(drawn) // 4):
        draw(torch.ones(1))
    assert (random.random(), np.random.rand()) == after
