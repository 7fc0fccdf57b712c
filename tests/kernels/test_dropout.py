"""`autoshard::dropout`: its mask, its scale, its gradient, and equality of shards and slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.kernels import dropout, keep_mask

SEED = torch.tensor(11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_keeps_and_scales(dtype: torch.dtype) -> None:
    """Kept elements are scaled by 1 / (1 - p), and the others are zero."""
    x = torch.randn(5, 7, dtype=dtype)
    y = dropout(x, SEED, 0.25, 3, [0, 0], [5, 7])
    keep = keep_mask((5, 7), (0, 0), (5, 7), SEED, 3, 0.25)
    expected = torch.where(keep, x.double() / 0.75, 0.0).to(dtype)
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected)


def test_gradient_is_the_same_op() -> None:
    """The backward applies the forward's mask and scale to the gradient."""
    x = torch.randn(6, 4, requires_grad=True)
    grad = torch.randn(6, 4)
    dropout(x, SEED, 0.5, 1, [2, 0], [8, 4]).backward(grad)
    assert x.grad is not None
    assert torch.equal(x.grad, dropout(grad, SEED, 0.5, 1, [2, 0], [8, 4]))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 5), st.floats(0.0, 1.0))
def test_shard_equals_slice(rows: int, columns: int, start: int, p: float) -> None:
    """Dropout of a shard is the slice of the dropout of the whole."""
    start = min(start, rows - 1)
    x = torch.randn(rows, columns)
    whole = dropout(x, SEED, p, 2, [0, 0], [rows, columns])
    assert torch.equal(whole[start:], dropout(x[start:], SEED, p, 2, [start, 0], [rows, columns]))


@pytest.mark.parametrize(("p", "factor"), [(0.0, 1.0), (1.0, 0.0)])
def test_extreme_probabilities(p: float, factor: float) -> None:
    """p = 0 returns a copy of the input, and p = 1 returns zeros rather than NaN."""
    x = torch.randn(3, 3)
    y = dropout(x, SEED, p, 0, [0, 0], [3, 3])
    assert torch.equal(y, x * factor)
    assert y.data_ptr() != x.data_ptr()


def test_opcheck() -> None:
    """Torch's checks of a custom operator pass for a transposed input, and the result is contiguous as in the fake
    run."""
    x = torch.randn(4, 3).t().requires_grad_()
    torch.library.opcheck(dropout, (x, SEED, 0.3, 1, [0, 0], [3, 4]))
    assert dropout(x, SEED, 0.3, 1, [0, 0], [3, 4]).is_contiguous()
