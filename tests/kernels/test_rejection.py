"""`autoshard::poisson`, `binomial` and `gamma` have PyTorch's distributions, for any parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autoshard.kernels import binomial, gamma, poisson

COUNT = 40_000
SEED = torch.tensor(23)
PLACE = (3, [0], [COUNT])


def _assert_alike(mine: Tensor, theirs: Tensor) -> None:
    """The shares of both below each of 50 joint quantiles differ by less than 3 / sqrt(n), a level of 1e-7 for two
    samples."""
    edges = torch.cat([mine, theirs]).double().quantile(torch.linspace(0.01, 0.99, 50, dtype=torch.float64))
    for edge in edges:
        below, below_theirs = ((x.double() <= edge).double().mean() for x in (mine, theirs))
        assert abs(float(below - below_theirs)) < 3.0 / math.sqrt(COUNT), edge


def _filled(value: float) -> Tensor:
    return torch.full((COUNT,), float(value))


@pytest.mark.parametrize("rate", [0.0, 0.2, 3.0, 9.9, 10.0, 47.0, 1e6])
def test_poisson(rate: float) -> None:
    """Draws and their mean agree with torch's for rates on both sides of 10, where the method changes."""
    torch.manual_seed(0)
    mine = poisson(_filled(rate), SEED, *PLACE)
    _assert_alike(mine, torch.poisson(_filled(rate)))
    assert abs(mine.double().mean().item() - rate) <= 5 * math.sqrt(rate / COUNT)


@pytest.mark.parametrize(("count", "p"), [(5, 0.0), (5, 1.0), (7, 0.3), (40, 0.9), (60, 0.5), (5000, 0.01), (900, 0.7)])
def test_binomial(count: int, p: float) -> None:
    """Draws and their mean agree with torch's for few and many trials, with likely and unlikely successes."""
    torch.manual_seed(0)
    mine = binomial(_filled(count), _filled(p), SEED, *PLACE)
    _assert_alike(mine, torch.binomial(_filled(count), _filled(p)))
    assert abs(mine.double().mean().item() - count * p) <= 5 * math.sqrt(count * p * (1 - p) / COUNT) + 1e-6


@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0, 2.5, 80.0])
def test_gamma(alpha: float) -> None:
    """Draws and their mean agree with torch's for parameters below 1, where a larger number is scaled
    down, and above."""
    torch.manual_seed(0)
    mine = gamma(_filled(alpha), SEED, *PLACE)
    _assert_alike(mine, torch._standard_gamma(_filled(alpha)))
    assert abs(mine.double().mean().item() - alpha) <= 5 * math.sqrt(alpha / COUNT)


def test_neighbours_do_not_matter() -> None:
    """An element draws the same number alone and beside elements with other parameters."""
    rates = torch.tensor([0.5, 30.0, 8.0, 1e4, 2.0])
    whole = poisson(rates, SEED, 3, [0], [5])
    for index in range(5):
        alone = poisson(rates[index : index + 1], SEED, 3, [index], [5])
        assert torch.equal(alone, whole[index : index + 1])


def test_parameters_out_of_range_give_nan() -> None:
    """Parameters that are out of range, infinite or NaN give NaN, rather than a loop without end."""
    bad = torch.tensor([-1.0, torch.nan, torch.inf])
    place = (0, [0], [3])
    assert bool(poisson(bad, SEED, *place).isnan().all())
    assert bool(gamma(bad, SEED, *place).isnan().all())
    assert bool(binomial(torch.full((3,), 4.0), torch.tensor([-0.5, 1.5, torch.nan]), SEED, *place).isnan().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_types(dtype: torch.dtype) -> None:
    """Torch's checks of a custom operator pass, and the result has the type of the parameter."""
    parameter = torch.full((8,), 3.0, dtype=dtype)
    for operator in (poisson, gamma):
        torch.library.opcheck(operator, (parameter, SEED, 0, [0], [8]))
        assert operator(parameter, SEED, 0, [0], [8]).dtype == dtype
    torch.library.opcheck(binomial, (parameter, parameter * 0.1, SEED, 0, [0], [8]))
