"""Sine and cosine of any angle equal float64's to the last places of float32."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from autoshard.kernels.generated.angles import cosine, sine
from autoshard.kernels.launch import launch
from tests.kernels.fused import DEVICE


@triton.jit
def _angles_kernel(x_ptr, sine_ptr, cosine_ptr, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < count, other=0.0)
    tl.store(sine_ptr + index, sine(x), mask=index < count)
    tl.store(cosine_ptr + index, cosine(x), mask=index < count)


def test_any_angle() -> None:
    """Small and huge angles of both signs, angles next to quarter turns, infinities and NaN."""
    spread = torch.logspace(-12, math.log10(3.4e38), 3000, dtype=torch.float64).float()
    quarters = (torch.arange(1, 2000, dtype=torch.float64) * (math.pi / 2)).float()
    # 16367173 2^72 is the float32 whose remainder is the smallest.
    x = torch.cat([spread, quarters, torch.tensor([0.0, 0.5, 16367173.0 * 2.0**72, math.inf, math.nan])])
    x = torch.cat([x, -x]).to(DEVICE)
    found = torch.empty(2, len(x), device=DEVICE)
    launch(_angles_kernel, lambda _: (triton.cdiv(len(x), 4096),), DEVICE, x, *found, len(x), BLOCK=4096, num_warps=4)
    expected = torch.stack([x.double().sin(), x.double().cos()])
    torch.testing.assert_close(found.double(), expected, rtol=3e-7, atol=1e-12, equal_nan=True)
