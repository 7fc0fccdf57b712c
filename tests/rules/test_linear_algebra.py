"""Batched linear algebra and transforms split their batches, with one device's results."""

from __future__ import annotations

import pytest
import torch

from autoshard.rules import strategies
from tests.rules.recording import check_database, check_recorded, check_splits, tensor

aten = torch.ops.aten

# fmt: off
_SAMPLED = [
    "cdist", "cholesky_solve", "fft.fft", "fft.irfft2", "fft.rfft", "isin", "linalg.cholesky", "linalg.cross",
    "linalg.det", "linalg.eigh", "linalg.inv", "linalg.qr", "linalg.solve", "linalg.svd", "lu_unpack", "searchsorted",
]
# fmt: on


def test_on_the_samples_of_pytorch() -> None:
    """On PyTorch's samples of linear algebra, every strategy has one device's results, forward and backward."""
    tally = check_database(_SAMPLED, limit=2)
    assert not tally.failures, "\n".join(tally.failures)


def test_factors_and_pivots_of_batches() -> None:
    """Three systems on two ranks are solved as on one device, although padding has no valid pivots."""
    lu, pivots = torch.linalg.lu_factor(torch.randn(3, 2, 2))
    check_splits(aten.linalg_lu_solve.default, lu, pivots, torch.randn(3, 2, 4))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten._linalg_svd.default, (False, False)),
        (aten._linalg_eigh.default, ("L", False)),
        (aten.linalg_qr.default, ("r",)),
    ],
    ids=str,
)
def test_results_that_are_not_asked_for(op: torch._ops.OpOverload, args: tuple[object, ...]) -> None:
    """Under every strategy, decompositions without vectors, which come as empty results, equal one device's."""
    x = tensor(4, 3, 3)
    check_splits(op, x + x.mT, *args)


def test_a_decomposition_without_pivots_has_no_permutation() -> None:
    """An LU decomposition without pivots, which only GPUs run, has a splitting strategy on the meta device."""
    x = torch.empty(4, 3, 3, device="meta")
    assert len(strategies(aten.linalg_lu.default, (x,), {"pivot": False}, 2)) > 1


def test_weight_norm() -> None:
    """Under every strategy, a weight norm along a dim and its gradients equal one device's."""
    v = torch.randn(4, 6, 2, dtype=torch.float64, requires_grad=True)
    g = torch.rand(4, 1, 1, dtype=torch.float64, requires_grad=True)
    tried = check_recorded(lambda: torch._weight_norm(v, g, 0))
    assert "aten._weight_norm_interface_backward.default" in tried


def test_rows_beside_padding_are_transformed_alone() -> None:
    """A transform of three rows on two ranks equals one device's, although padding is NaN."""
    check_splits(aten._fft_r2c.default, torch.randn(3, 4), [1], 0, True)
