"""Batch normalisation uses the statistics of the global batch, for any split of the batch."""

from __future__ import annotations

import pytest
import torch

from autoshard.rules import strategies
from tests.rules.recording import check_splits

aten = torch.ops.aten


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(4, 8), (8, 4, 3, 2)])
@pytest.mark.parametrize("affine", [False, True])
def test_training(shape: tuple[int, ...], affine: bool) -> None:
    """Under every strategy, training batch norms have one device's outputs, statistics and gradients."""
    x, channels = _draw(*shape), shape[1]
    weight, bias = (_draw(channels), _draw(channels)) if affine else (None, None)
    running = (_draw(channels), _draw(channels).abs())
    check_splits(aten._native_batch_norm_legit_functional.default, x, weight, bias, *running, True, 0.1, 1e-5)
    check_splits(aten._native_batch_norm_legit.no_stats, x, weight, bias, True, 0.1, 1e-5)
    check_splits(aten.native_batch_norm.default, x, weight, bias, None, None, True, 0.1, 1e-5)
    _, mean, invstd = aten.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    for mask in ([True, affine, affine], [True, False, False]):
        args = (_draw(*shape), x, weight, *running, mean, invstd, True, 1e-5, mask)
        check_splits(aten.native_batch_norm_backward.default, *args)


@pytest.mark.parametrize("affine", [False, True])
def test_evaluation(affine: bool) -> None:
    """Under every strategy, batch norms in evaluation have one device's outputs and gradients."""
    x, running = _draw(4, 8, 2), (_draw(8), _draw(8).abs())
    weight, bias = (_draw(8), _draw(8)) if affine else (None, None)
    check_splits(aten.native_batch_norm.default, x, weight, bias, *running, False, 0.1, 1e-5)
    check_splits(aten._native_batch_norm_legit_functional.default, x, weight, bias, *running, False, 0.1, 1e-5)
    check_splits(aten._native_batch_norm_legit_no_training.default, x, weight, bias, *running, 0.1, 1e-5)
    _, mean, invstd = aten.native_batch_norm(x, weight, bias, *running, False, 0.1, 1e-5)
    args = (_draw(4, 8, 2), x, weight, *running, mean, invstd, False, 1e-5, [True, affine, affine])
    check_splits(aten.native_batch_norm_backward.default, *args)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16, None])
def test_half_precision(parameters: torch.dtype | None) -> None:
    """Under every strategy, a bfloat16 batch norm has one device's values and dtypes, for each dtype of its weights."""
    x, grad = torch.randn(4, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    weight = None if parameters is None else torch.randn(8).to(parameters)
    running = (torch.randn(8).to(parameters or x.dtype), torch.rand(8).to(parameters or x.dtype))
    check_splits(aten._native_batch_norm_legit_functional.default, x, weight, weight, *running, True, 0.1, 1e-5)
    check_splits(aten._native_batch_norm_legit.no_stats, x, weight, weight, True, 0.1, 1e-5)
    _, mean, invstd = aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)
    mask = [True, weight is not None, weight is not None]
    args = (grad, x, weight, *running, mean, invstd, True, 1e-5, mask)
    check_splits(aten.native_batch_norm_backward.default, *args)


def test_what_changes_its_operands_has_no_rule() -> None:
    """A batch norm that writes its running statistics has the replicated strategy only."""
    args = (_draw(4, 8), None, None, _draw(8), _draw(8).abs(), True, 0.1, 1e-5)
    assert len(strategies(aten.native_batch_norm.default, args, {}, 2)) == 1
