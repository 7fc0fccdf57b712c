"""Batched linear algebra and transforms: batches are independent."""

from __future__ import annotations

import torch

from tests.rules.recording import check_database, check_recorded, check_splits

# fmt: off
_SAMPLED = [
    "cdist", "cholesky_solve", "fft.fft", "fft.irfft2", "fft.rfft", "isin", "linalg.cholesky", "linalg.cross",
    "linalg.det", "linalg.eigh", "linalg.inv", "linalg.qr", "linalg.solve", "linalg.svd", "lu_unpack", "searchsorted",
]
# fmt: on


def test_on_the_samples_of_pytorch() -> None:
    """PyTorch's own samples run under every strategy, forward and backward."""
    tally = check_database(_SAMPLED, limit=2)
    assert not tally.failures, "\n".join(tally.failures)


def test_factors_and_pivots_of_batches() -> None:
    """Three systems on two ranks: padding has no pivots (found by the samples)."""
    lu, pivots = torch.linalg.lu_factor(torch.randn(3, 2, 2))
    check_splits(torch.ops.aten.linalg_lu_solve.default, lu, pivots, torch.randn(3, 2, 4))


def test_weight_norm() -> None:
    """Slices along the dim are independent, forward and backward."""
    v = torch.randn(4, 6, 2, dtype=torch.float64, requires_grad=True)
    g = torch.rand(4, 1, 1, dtype=torch.float64, requires_grad=True)
    tried = check_recorded(lambda: torch._weight_norm(v, g, 0))
    assert "aten._weight_norm_interface_backward.default" in tried


def test_rows_beside_padding_are_transformed_alone() -> None:
    """Libraries transform several rows at once: three rows on two ranks, where padding is not a number."""
    check_splits(torch.ops.aten._fft_r2c.default, torch.randn(3, 4), [1], 0, True)
