"""`autoshard::random`: each distribution is PyTorch's, in every type, and a shard is a slice of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoshard.errors import KernelError
from autoshard.kernels.random_numbers import DISTRIBUTIONS, random, random_reference

COUNT = 40_000
SEED = torch.tensor(2**40 + 17)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

PARAMETERS: dict[str, list[float]] = {
    "uniform": [-1.0, 3.0], "normal": [1.0, 2.0], "log_normal": [0.5, 0.4], "exponential": [0.7], "cauchy": [1.0, 2.0],
    "geometric": [0.3], "bernoulli": [0.3], "integer": [-3, 8], "truncated_normal": [1.0, 2.0, -1.0, 2.5],
}  # fmt: skip

_OF_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda x: x.uniform_(-1.0, 3.0), "normal": lambda x: x.normal_(1.0, 2.0),
    "log_normal": lambda x: x.log_normal_(0.5, 0.4), "exponential": lambda x: x.exponential_(0.7),
    "cauchy": lambda x: x.cauchy_(1.0, 2.0), "geometric": lambda x: x.geometric_(0.3),
    "bernoulli": lambda x: x.bernoulli_(0.3), "integer": lambda x: x.random_(-3, 8),
    "truncated_normal": lambda x: torch.nn.init.trunc_normal_(x, 1.0, 2.0, -1.0, 2.5),
}  # fmt: skip

_CUMULATED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "uniform": lambda x: (x + 1.0) / 4.0,
    "normal": lambda x: _normal_below((x - 1.0) / 2.0),
    "log_normal": lambda x: _normal_below((np.log(x) - 0.5) / 0.4),
    "exponential": lambda x: 1.0 - np.exp(-0.7 * x),
    "cauchy": lambda x: np.arctan((x - 1.0) / 2.0) / math.pi + 0.5,
    "geometric": lambda x: 1.0 - 0.7 ** np.floor(x),
    "bernoulli": lambda x: np.where(x < 1.0, 0.7, 1.0),
    "integer": lambda x: (np.floor(x) + 4.0) / 11.0,
    "truncated_normal": lambda x: (_normal_below((x - 1.0) / 2.0) - _LEFT) / (_normal_below(np.array(0.75)) - _LEFT),
}
"""The probability of at most x."""

_DISCRETE = ("geometric", "bernoulli", "integer")


def _normal_below(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + torch.erf(torch.as_tensor(x) / math.sqrt(2.0)).numpy())


_LEFT = _normal_below(np.array(-1.0))


def draw(distribution: str, *, count: int = COUNT, dtype: torch.dtype = torch.float64, site: int = 4) -> Tensor:
    return random(SEED, distribution, PARAMETERS[distribution], site, [count], [0], [count], dtype=dtype)


def distance(x: Tensor, cumulated: Callable[[np.ndarray], np.ndarray]) -> float:
    """Kolmogorov's distance: the largest difference between the share of numbers up to x and the probability of at
    most x."""
    values, counts = np.unique(x.double().numpy(), return_counts=True)
    shares, expected = counts.cumsum() / len(x), cumulated(values)
    return float(max(np.abs(shares - expected).max(), np.abs(shares - counts / len(x) - _left_of(expected)).max()))


def _left_of(expected: np.ndarray) -> np.ndarray:
    """The probability of less than x for distributions with few values, and of at most x for others."""
    return np.concatenate(([0.0], expected[:-1])) if len(expected) < 100 else expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_numbers_follow_the_distribution(distribution: str, dtype: torch.dtype) -> None:
    """Numbers pass the Kolmogorov-Smirnov test at a level of 1e-5, 2.5 / sqrt(n), and PyTorch's own numbers pass it
    too."""
    limit = 2.5 / math.sqrt(COUNT)
    assert distance(draw(distribution, dtype=dtype), _CUMULATED[distribution]) < limit
    torch.manual_seed(0)
    theirs = _OF_TORCH[distribution](torch.empty(COUNT, dtype=dtype))
    assert distance(theirs, _CUMULATED[distribution]) < limit


@pytest.mark.parametrize("distribution", [name for name in DISTRIBUTIONS if name != "cauchy"])
def test_moments_are_those_of_pytorch(distribution: str) -> None:
    """Mean and second moment differ from those of PyTorch's numbers by less than six standard errors."""
    torch.manual_seed(0)
    mine, theirs = draw(distribution), _OF_TORCH[distribution](torch.empty(COUNT, dtype=torch.float64))
    for power in (1, 2):
        a, b = ((x - theirs.mean()) ** power for x in (mine, theirs))
        error = math.sqrt(float(a.var() + b.var()) / COUNT)
        assert abs(float(a.mean() - b.mean())) < 6 * error


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_numbers_stay_below_one(dtype: torch.dtype) -> None:
    """Numbers are multiples of the last bit that the dtype holds, and none rounds up to 1."""
    x = random(SEED, "uniform", [0.0, 1.0], 1, [COUNT], [0], [COUNT], dtype=dtype)
    bits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    assert x.dtype == dtype
    assert 0.0 <= x.min().item() <= x.max().item() < 1.0
    assert torch.equal(x.double() * 2**bits, (x.double() * 2**bits).floor())
    if bits < 12:
        assert len(x.unique()) == 2**bits


@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (-0.3, 0.1), (2.0, 2.0)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_numbers_stay_below_the_end(low: float, high: float, dtype: torch.dtype) -> None:
    """Numbers rounded to the dtype stay below the interval's end, unless the interval is empty."""
    x = random(SEED, "uniform", [low, high], 1, [COUNT], [0], [COUNT], dtype=dtype)
    first, last = (torch.tensor(bound, dtype=dtype) for bound in (low, high))
    assert bool((x >= first).all())
    assert bool((x < last).all()) or bool((x == first).all())


def test_exponential_numbers_are_above_zero() -> None:
    """The least exponential number is above zero, because categories are drawn by p / exponential."""
    assert 0.0 < draw("exponential", dtype=torch.float32).min().item() < 1e-3


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [(0, 256, torch.uint8), (-128, 128, torch.int8), (0, 2, torch.bool), (0, 2**63, torch.int64),
     (-(2**62), 2**62, torch.int64), (5, 6, torch.int32), (0, 2**24 + 1, torch.float32)],
)  # fmt: skip
def test_integers_fill_their_range(low: int, high: int, dtype: torch.dtype) -> None:
    """All integers of a small range occur, and of a large range both halves are equally frequent."""
    x = random(SEED, "integer", [low, high], 1, [COUNT], [0], [COUNT], dtype=dtype)
    assert x.dtype == dtype
    assert low <= int(x.min()) <= int(x.max()) < high
    if high - low <= 256:
        assert len(x.unique()) == high - low
    else:
        assert abs((x.double() < (low + high) / 2).double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(COUNT)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_neighbours_sites_and_seeds_are_independent(distribution: str) -> None:
    """Neighbours in one draw, and the draws of two sites, correlate by less than five standard errors."""
    draws = (draw(distribution, site=site) for site in (4, 5))
    x, other = (x if distribution in _DISCRETE else x.argsort().argsort().double() for x in draws)
    for a, b in ((x[1:], x[:-1]), (x, other)):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / math.sqrt(COUNT)


@given(st.sampled_from(sorted(DISTRIBUTIONS)), st.integers(1, 6), st.integers(1, 6), st.integers(0, 5))
def test_shard_equals_slice(distribution: str, rows: int, columns: int, start: int) -> None:
    """A shard's numbers are the slice of the whole array's, bit for bit."""
    start, options = min(start, rows - 1), {"dtype": torch.float32}
    whole = random_reference(
        SEED, distribution, PARAMETERS[distribution], 3, (rows, columns), (0, 0), (rows, columns), **options
    )
    part = random_reference(
        SEED, distribution, PARAMETERS[distribution], 3, (rows - start, columns), (start, 0), (rows, columns), **options
    )
    assert torch.equal(whole[start:], part)


@pytest.mark.parametrize(
    ("distribution", "parameters"),
    [("uniform", [1.0, 0.0]), ("normal", [0.0, -1.0]), ("log_normal", [0.0, 0.0]), ("exponential", [0.0]),
     ("cauchy", [0.0, -1.0]), ("geometric", [1.0]), ("bernoulli", [1.5]), ("integer", [3, 3]),
     ("integer", [-(2**63), 2**63]), ("truncated_normal", [0.0, 1.0, 2.0, 1.0])],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(distribution: str, parameters: list[float]) -> None:
    """Parameters out of range are refused, and the message says the distribution's condition and the
    given parameters."""
    with pytest.raises(KernelError, match=rf"{distribution} numbers need .*; got .*{parameters[-1]}\."):
        random(SEED, distribution, parameters, 0, [2], [0], [2], dtype=torch.float32)


def test_unknown_distributions_are_refused() -> None:
    """An unknown distribution is refused, and the message lists the known distributions."""
    with pytest.raises(KernelError, match=r"distribution='beta' is unknown\. Known: uniform, normal"):
        random(SEED, "beta", [1.0], 0, [2], [0], [2], dtype=torch.float32)


def test_opcheck() -> None:
    """Torch's checks of a custom operator pass."""
    torch.library.opcheck(random, (SEED, "normal", [0.0, 1.0], 1, [4, 3], [0, 0], [4, 3]), {"dtype": torch.bfloat16})
