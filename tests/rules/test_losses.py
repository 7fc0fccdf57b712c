"""Losses split rows, cross-entropy splits classes too, and means of pieces add up to the mean."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from autoshard.ir.mesh import Mesh
from autoshard.rules import strategies
from tests.rules.recording import MESH_PAIRS, check_database, check_recorded, check_splits

aten = torch.ops.aten
ops = torch.ops.autoshard


@given(
    rows=st.sampled_from([2, 4, 6]),
    classes=st.sampled_from([4, 8, 12]),
    smoothing=st.sampled_from([0.0, 0.1]),
    pair=MESH_PAIRS,
)
def test_cross_entropy(rows: int, classes: int, smoothing: float, pair: Sequence[Mesh]) -> None:
    """Under every strategy, cross-entropy and its gradient equal one device's, with ignored targets and smoothing."""
    logits = 3 * torch.randn(rows, classes, dtype=torch.float64)
    target = torch.randint(0, classes, (rows,))
    target[0] = -100
    check_splits(ops.cross_entropy.default, logits, target, -100, smoothing, meshes=pair)
    _, lse = ops.cross_entropy(logits, target, -100, smoothing)
    grad = torch.randn(rows, dtype=torch.float64)
    check_splits(ops.cross_entropy_backward.default, grad, logits, target, lse, -100, smoothing, meshes=pair)


def test_cross_entropy_of_infinite_logits() -> None:
    """Under every strategy, cross-entropy equals one device's if half of the classes or a whole row is -inf."""
    logits = torch.randn(4, 8, dtype=torch.float64)
    logits[:, :4] = -torch.inf
    logits[2], logits[3, 5] = -torch.inf, torch.inf  # a row of which nothing is left, and one with the greatest
    check_splits(ops.cross_entropy.default, logits, torch.tensor([4, 5, 6, -100]), -100, 0.0)


@given(batch=st.sampled_from([3, 4, 6]), pair=MESH_PAIRS)
def test_ctc_loss(batch: int, pair: Sequence[Mesh]) -> None:
    """Under every strategy, CTC losses of unlike lengths and their gradients equal one device's.

    The batch can be split.
    """
    log_probs = torch.randn(7, batch, 5, dtype=torch.float64).log_softmax(-1)
    targets, lengths = torch.randint(1, 5, (batch, 3)), torch.arange(batch)
    operands = (log_probs, targets, 7 - lengths % 2, lengths % 4)
    check_splits(ops.ctc_loss.default, *operands, 0, False, meshes=pair)
    grad = torch.randn(batch, dtype=torch.float64)
    results = ops.ctc_loss(*operands, 0, False)
    check_splits(ops.ctc_loss_backward.default, grad, *operands, *results, 0, False, meshes=pair)
    found = strategies(ops.ctc_loss.default, (*operands, 0, False), {}, 2)
    assert any(operand[0].is_shard(1) and all(x.is_shard(0) for x in results) for operand, results in found)


def test_the_loss_of_split_classes_is_whole() -> None:
    """With split classes a cross-entropy is whole, because reductions over classes are inside the call."""
    args = (torch.randn(4, 8), torch.zeros(4, dtype=torch.int64), -100, 0.0)
    found = strategies(ops.cross_entropy.default, args, {}, 2)
    assert any(i[0].is_shard(1) and all(o.is_replicate() for o in outputs) for i, outputs in found)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(4, 8), (4, 6, 2, 4)])
def test_nll_loss(reduction: str, weighted: bool, shape: tuple[int, ...]) -> None:
    """Under every strategy, NLL losses and gradients equal one device's, with weights and ignored rows."""
    logits = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    target[0] = 1
    weight = torch.rand(shape[1], dtype=torch.float64) if weighted else None
    check_recorded(lambda: F.nll_loss(logits, target, weight, reduction=reduction, ignore_index=1))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss])
def test_pointwise_losses(loss: object, reduction: str) -> None:
    """Under every strategy, pointwise losses and gradients equal one device's, for each reduction."""
    x, y = (torch.randn(4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert callable(loss)
    check_recorded(lambda: loss(x, y.detach(), reduction=reduction))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_binary_cross_entropy(reduction: str) -> None:
    """Under every strategy, binary cross-entropies and gradients equal one device's, with and without weights."""
    x = torch.rand(4, 8, dtype=torch.float64, requires_grad=True)
    y, weight = torch.rand(4, 8, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    check_recorded(lambda: F.binary_cross_entropy(x, y, reduction=reduction))
    check_recorded(lambda: F.binary_cross_entropy(x, y, weight, reduction=reduction))
    check_recorded(lambda: F.binary_cross_entropy_with_logits(x, y, weight, reduction=reduction, pos_weight=weight))


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_losses_of_operands_that_broadcast(reduction: int) -> None:
    """Under every strategy, losses of broadcast operands and of empty operands equal one device's."""
    for op in (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default):
        check_splits(op, torch.randn(5, 6), torch.randn(1, 6), reduction)
        check_splits(op, torch.randn(6), torch.randn(5, 6), reduction)
    check_splits(aten.mse_loss.default, torch.zeros(0, 4), torch.zeros(0, 4), reduction)


def test_on_the_samples_of_pytorch() -> None:
    """On PyTorch's samples of losses, every strategy has one device's results, forward and backward."""
    tally = check_database(["nn.functional.cross_entropy", "nn.functional.nll_loss", "nn.functional.mse_loss"])
    assert not tally.failures, "\n".join(tally.failures)
