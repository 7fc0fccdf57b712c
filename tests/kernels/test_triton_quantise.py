"""Quantising for reductions: its error is bounded, and the kernels give the reference's codes bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoshard.errors import KernelError
from autoshard.kernels.quantise import TOPS, dequantise_sum, quantisation_error, quantise
from autoshard.kernels.triton_quantise import triton_dequantise_sum, triton_quantise
from tests.kernels.fused import DEVICE, draw, dtypes

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
codes_dtypes = st.sampled_from([*TOPS, torch.bfloat16])
# Triton's interpreter truncates to bfloat16 where torch and compiled kernels round.
ULP = 2.0**-7 if DEVICE.type == "cpu" else 0.0


@settings(max_examples=20)
@given(
    st.integers(1, 3), st.integers(1, 90), st.integers(1, 40), dtypes, codes_dtypes, st.sampled_from([1e-40, 1, 1e3])
)
@example(2, 33, 16, torch.float32, torch.float8_e4m3fn, 1)
@example(1, 20, 8, torch.float32, torch.int8, 1e-40)
def test_what_comes_back_is_near(
    ranks: int, count: int, block: int, dtype: torch.dtype, code_dtype: torch.dtype, size: float
) -> None:
    """Each element of the sum differs by no more than its addends' bounds; kernels give what references give."""
    if torch.bfloat16 in (dtype, code_dtype):
        size = max(size, 1e-25)  # Triton's interpreter reads the smallest bfloat16 numbers wrong
    x = (size * draw(ranks, count) * torch.logspace(-6, 0, count, device=DEVICE)).to(dtype)
    made = [triton_quantise(row, code_dtype, block) for row in x]
    bound = torch.zeros(count, dtype=torch.float64, device=DEVICE)
    for row, (codes, scales) in zip(x, made, strict=True):
        expected = quantise(row, code_dtype, block)
        if code_dtype == torch.bfloat16:
            torch.testing.assert_close(codes, expected[0], rtol=ULP, atol=2e-38)
        else:
            assert torch.equal(codes.view(torch.int8), expected[0].view(torch.int8))
            assert torch.equal(scales, expected[1])
        bound += quantisation_error(row, scales, code_dtype, block)
    stacked = torch.stack([codes for codes, _ in made]), torch.stack([scales for _, scales in made])
    total = triton_dequantise_sum(*stacked, torch.float32, block)
    fused = 0.0 if DEVICE.type == "cpu" else 2e-7 * ranks  # a GPU rounds a product and its sum once
    expected = dequantise_sum(*stacked, torch.float32, block)
    assert bool(((total - expected).abs() <= fused * x.float().abs().sum(0)).all())
    slack = x.double().abs().sum(0) * (ULP if code_dtype == torch.bfloat16 else 0.0) + 2e-38
    rounding = 2.0**-22 * ranks * x.double().abs().sum(0)
    assert bool(((total.double() - x.double().sum(0)).abs() <= bound * (1 + 1e-6) + slack + rounding).all())


def test_every_code_of_8_bits_comes_back() -> None:
    """All finite numbers of a type, at the scale 1, are quantised to themselves."""
    for dtype, top in TOPS.items():
        every = torch.arange(256, device=DEVICE).to(torch.uint8).view(dtype).float()
        finite = every[every.isfinite() & (every >= -top)]
        codes, scales = triton_quantise(finite, dtype, 256)
        assert scales.tolist() == [1.0]
        assert torch.equal(codes, quantise(finite, dtype, 256)[0])
        assert torch.equal(triton_dequantise_sum(codes[None], scales[None], torch.float32, 256), finite)


def test_nan_and_infinity_are_not_lost() -> None:
    """A block that has one comes back as NaN; others are as they were."""
    for dtype in TOPS:
        x = torch.tensor([1.0, float("nan"), 2.0, 2.0, float("inf"), 1.0], device=DEVICE)
        codes, scales = triton_quantise(x, dtype, 2)
        back = triton_dequantise_sum(codes[None], scales[None], torch.float32, 2)
        assert back.isnan().tolist() == [True, True, False, False, True, True]


def test_strided_operands() -> None:
    """Elements are taken in the order of the dims, however they lie."""
    x = draw(7, 5).t()
    codes, scales = triton_quantise(x, torch.int8, 4)
    expected = quantise(x.contiguous(), torch.int8, 4)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scales, expected[1])
    rows, each = codes.reshape(1, -1).expand(3, -1), scales.expand(3, -1)
    total = triton_dequantise_sum(rows, each, torch.float16, 4)
    assert torch.equal(total, dequantise_sum(rows, each, torch.float16, 4))


def test_what_does_not_fit_is_refused() -> None:
    """Types without a rounding here, scales of other blocks, and blocks too long are refused with the reason."""
    with pytest.raises(KernelError, match=r"dtype=torch\.int16 is none of"):
        quantise(draw(3), torch.int16, 2)
    with pytest.raises(KernelError, match=r"need scales \[R, 2\]"):
        dequantise_sum(torch.ones(1, 3, dtype=torch.int8), torch.ones(1, 3), torch.float32, 2)
    with pytest.raises(KernelError, match="blocks of up to 4096"):
        triton_quantise(draw(3), torch.int8, 5000)
    with pytest.raises(KernelError, match="blocks of up to 4096"):
        triton_dequantise_sum(torch.ones(1, 3, dtype=torch.int8), torch.ones(1, 1), torch.float32, 5000)
    with pytest.raises(KernelError, match=r"need scales \[R, 2\]"):
        triton_dequantise_sum(torch.ones(1, 3, dtype=torch.int8), torch.ones(1, 3), torch.float32, 2)
