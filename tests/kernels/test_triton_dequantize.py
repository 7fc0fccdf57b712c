"""The dequantising kernel writes the weights of the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import KernelError
from autoshard.kernels.dequantize import GROUP, SCALE_VALUES, dequantize_nf4_reference
from autoshard.kernels.triton_dequantize import triton_dequantize_nf4

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def drawn_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=DEVICE)


def drawn_floats(count: int) -> torch.Tensor:
    return torch.rand(count, device=DEVICE).view(torch.uint8)


@given(
    rows=st.integers(1, 40),
    columns=st.sampled_from([2, 64, 96, 130, 256]),
    blocksize=st.sampled_from([32, 64, 256]),
    nested=st.booleans(),
    first=st.integers(0, 3 * GROUP),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_equal_to_the_definition(
    rows: int, columns: int, blocksize: int, nested: bool, first: int, dtype: torch.dtype
) -> None:
    """The kernel equals the reference for any shape and block, for plain and nested scales, and for pieces that begin
    within a group."""
    weights = rows * columns
    blocks = -(-weights // blocksize)
    scales = drawn_floats(SCALE_VALUES + 1 + (first + blocks) // GROUP + 1) if nested else None
    absmax = drawn_bytes(blocks) if nested else drawn_floats(blocks)
    arguments = (drawn_bytes(weights // 2), absmax, scales, [rows, columns], blocksize, first, dtype)
    out, expected = triton_dequantize_nf4(*arguments), dequantize_nf4_reference(*arguments)
    # The interpreter truncates to bfloat16 where torch and compiled kernels round; a GPU fuses multiply and add.
    rtol = 1e-6 if DEVICE.type == "cuda" else 0.0
    ulp = torch.finfo(dtype).eps if dtype is not torch.float32 else rtol
    torch.testing.assert_close(out, expected, rtol=ulp, atol=1e-7 if DEVICE.type == "cuda" else 0.0)


def test_float64_is_refused() -> None:
    """A result in float64 is refused, and the error names the dtype."""
    with pytest.raises(KernelError, match=r"has dtype torch\.float64"):
        triton_dequantize_nf4(drawn_bytes(32), drawn_floats(1), None, [1, 64], 64, 0, torch.float64)
