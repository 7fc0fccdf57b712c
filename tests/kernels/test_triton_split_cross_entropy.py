"""The local parts of cross-entropy over a split vocabulary equal their reference in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoshard.errors import KernelError
from autoshard.kernels.split_cross_entropy import (
    split_cross_entropy_backward_reference,
    split_cross_entropy_reference,
)
from autoshard.kernels.triton_split_cross_entropy import (
    triton_split_cross_entropy,
    triton_split_cross_entropy_backward,
)
from tests.kernels.fused import DEVICE, assert_results, draw, dtypes

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")


def _targets(rows: int, columns: int) -> dict[str, Tensor]:
    indices = torch.randint(columns, (rows,), device=DEVICE)
    return {"indices": indices, "elsewhere": torch.rand(rows, device=DEVICE) < 0.5}


def _check(logits: Tensor, smoothing: float) -> None:
    rows, columns = logits.shape
    targets, top = _targets(rows, columns), logits.amax(1).float()
    actual = triton_split_cross_entropy(logits, top, **targets, factor=1.0 - smoothing)
    expected = split_cross_entropy_reference(logits, top.double(), **targets, factor=1.0 - smoothing)
    assert_results(actual, expected, torch.float32, scale=columns)
    lse, scale = torch.randn(rows, device=DEVICE), torch.rand(rows, device=DEVICE)
    rest = {**targets, "is_ignored": torch.rand(rows, device=DEVICE) < 0.3, "correction": smoothing - 1.0}
    rest |= {"shift": smoothing / columns}
    grad = triton_split_cross_entropy_backward(logits, lse, scale, **rest)
    exact = split_cross_entropy_backward_reference(logits.double(), lse.double(), scale.double(), **rest)
    assert_results(grad, (exact,), logits.dtype)


@given(st.integers(1, 19), st.integers(1, 67), dtypes, st.sampled_from([0.0, 0.1]))
def test_split_cross_entropy(rows: int, columns: int, dtype: torch.dtype, smoothing: float) -> None:
    """Sum, target's logit and gradient are right at odd sizes, with targets here, elsewhere and ignored, smoothed or
    not."""
    _check(draw(rows, columns, dtype=dtype), smoothing)


def test_strided_rows_in_several_blocks() -> None:
    """Rows with gaps between them that are longer than a block have the reference's results."""
    _check(draw(3, 9100)[:, 50:9050], 0.0)


def test_what_does_not_fit_is_refused() -> None:
    """A statistic with another number of rows, and one that is not in float32, are refused with the reason."""
    logits, targets = draw(4, 3), _targets(4, 3)
    with pytest.raises(KernelError, match="one number per row"):
        triton_split_cross_entropy(logits, draw(3), **targets, factor=1.0)
    with pytest.raises(KernelError, match="takes top in float32"):
        triton_split_cross_entropy(logits, draw(4, dtype=torch.float16), **targets, factor=1.0)
