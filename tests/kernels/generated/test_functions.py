"""Functions for generated kernels are right to the last places of float32, compared with float64."""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl

from autoshard.kernels.generated.functions import tanh
from autoshard.kernels.launch import launch
from tests.kernels.fused import DEVICE


@triton.jit
def _tanh_kernel(x_ptr, found_ptr, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < count, other=0.0)
    tl.store(found_ptr + index, tanh(x), mask=index < count)


def _off_by_ulps(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Distance of float32 numbers from exact numbers, in units in the last place of the exact numbers."""
    _, exponent = torch.frexp(expected)
    return (found.double() - expected).abs() / torch.ldexp(torch.ones_like(expected), exponent - 24)


def test_tanh_is_right_to_a_few_units_of_the_last_place() -> None:
    """tanh errs by at most 2.1 units from 1e-30 to 12, on both sides of zero."""
    near, edge = torch.logspace(-30, -1, 4000), torch.linspace(0.6, 0.65, 4000)
    x = torch.cat([near, torch.linspace(0.01, 0.625, 4000), edge, torch.linspace(0.6, 12, 4000)])
    x = torch.cat([x, -x]).to(DEVICE)
    found = torch.empty_like(x)
    launch(_tanh_kernel, lambda _: (triton.cdiv(len(x), 4096),), DEVICE, x, found, len(x), BLOCK=4096, num_warps=4)
    off = _off_by_ulps(found, x.double().tanh())
    assert float(off.max()) <= 2.1, float(x[off.argmax()])


def test_tanh_at_its_ends() -> None:
    """tanh equals torch's at zeros of both signs, at numbers too small to be squared, at large numbers, infinities and
    NaN."""
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0, math.inf, -math.inf, math.nan], device=DEVICE)
    found = torch.empty_like(x)
    with np.errstate(invalid="ignore"):  # as for every generated kernel: the series that is not taken
        launch(_tanh_kernel, lambda _: (1,), DEVICE, x, found, len(x), BLOCK=16, num_warps=4)
    torch.testing.assert_close(found, x.tanh(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[:-1].signbit(), x[:-1].signbit())
