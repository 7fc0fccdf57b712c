"""The dropout kernel draws the reference's bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from autoshard.errors import KernelError
from autoshard.kernels.dropout import dropout_reference
from autoshard.kernels.triton_dropout import triton_dropout

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@st.composite
def shards(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(shape, offset, global_shape) of a shard."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    offset = [draw(st.integers(0, 5000)) for _ in shape]
    whole = [size + start + draw(st.integers(0, 3)) for size, start in zip(shape, offset, strict=True)]
    return shape, offset, whole


@given(
    shards(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**32 - 1),
    st.floats(0.0, 1.0),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@example(([40, 3], [0, 0], [40, 3]), 1, 1, 0.5, torch.float32)
@example(([2, 5, 7, 3], [2**20, 0, 1, 0], [2**21, 5, 2**15, 3]), -1, 2**32 - 1, 0.25, torch.float32)
def test_bit_equal_to_the_reference(
    shard: tuple[list[int], list[int], list[int]], seed: int, site: int, p: float, dtype: torch.dtype
) -> None:
    """The kernel keeps the reference's elements with the reference's values, also far into large arrays."""
    shape, offset, whole = shard
    x = torch.randn(shape, device=DEVICE).clamp(-9, 9).to(dtype)
    p = min(p, 0.99)
    key = torch.tensor(seed, device=DEVICE)
    arguments = (x, key, p, site, offset, whole)
    out, expected = triton_dropout(*arguments), dropout_reference(*arguments)
    assert torch.equal(out == 0, expected == 0)
    # Triton's interpreter truncates to bfloat16 where torch and compiled kernels round.
    ulp = torch.finfo(dtype).eps if dtype == torch.bfloat16 and DEVICE.type == "cpu" else 0.0
    torch.testing.assert_close(out, expected, rtol=ulp, atol=0)


def test_strided_wide_and_extreme() -> None:
    """A view with gaps between rows of several blocks has the reference's values for p = 0, 0.5 and 1."""
    key = torch.tensor(3, device=DEVICE)
    x = torch.randn(5, 2300, device=DEVICE)[1:4, 7:2100]
    for p in (0.0, 0.5, 1.0):
        arguments = (x, key, p, 1, [1, 7], [5, 2300])
        torch.testing.assert_close(triton_dropout(*arguments), dropout_reference(*arguments), rtol=0, atol=0)


def test_five_dims_are_refused() -> None:
    """An operand of five dims is refused, and the error names the number."""
    x = torch.zeros(1, 1, 1, 1, 1, device=DEVICE)
    with pytest.raises(KernelError, match="x has 5 dims"):
        triton_dropout(x, torch.tensor(0, device=DEVICE), 0.5, 0, [0] * 5, [1] * 5)
