"""Operators that create tensors: each rank makes its piece, with the local shape and the global offset."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.rules import strategies
from tests.rules.recording import check_splits, tensor

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.zeros.default, ([4, 8],)),
        (aten.ones.default, ([4, 8],)),
        (aten.full.default, ([4, 8], 3)),
        (aten.arange.default, (8,)),
        (aten.arange.start, (3, 11)),
        (aten.arange.start_step, (3, 26, 3)),
        (aten.arange.start_step, (8, -8, -2)),
        (aten.new_zeros.default, (tensor(3), [4, 8])),
        (aten.new_ones.default, (tensor(4, 8), [4, 8])),
        (aten.new_full.default, (tensor(3), [4, 8], 2)),
        (aten.zeros_like.default, (tensor(4, 8),)),
        (aten.ones_like.default, (tensor(4, 8),)),
        (aten.full_like.default, (tensor(4, 8), 0)),
        (aten.scalar_tensor.default, (0.0,)),
    ],
    ids=str,
)
def test_creation(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    """Every strategy creates the tensor of one device."""
    check_splits(op, *args)


def test_zeros_are_a_pending_sum() -> None:
    """Zeros may be a pending sum, so that values added to them stay pending, and ones may not."""
    assert any(outputs[0].is_partial("sum") for _, outputs in strategies(aten.zeros.default, ([4],), {}, 2))
    assert not any(outputs[0].is_partial() for _, outputs in strategies(aten.ones.default, ([4],), {}, 2))


def test_steps_of_floats_stay_whole() -> None:
    """Ranges of floats stay whole, because an element rounds by its distance from the start."""
    assert len(strategies(aten.arange.start_step, (0.0, 0.8, 0.1), {}, 2)) == 1
