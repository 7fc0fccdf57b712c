"""Softmax may split its own dim, evenly or not, and then communicates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.rules import strategies
from autoshard.rules.registry import bound_rule
from autoshard.testing.strategies import meshes
from tests.rules.recording import check_call, check_database, check_splits, tensor

aten = torch.ops.aten


@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3), mesh=meshes(max_axes=2, max_ranks=6), data=st.data())
def test_any_dim_is_split(shape: list[int], mesh: Any, data: st.DataObject) -> None:
    """Under every strategy, softmax and log-softmax of drawn shapes, and their gradients, equal one device's."""
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    x, grad = tensor(*shape), tensor(*shape)
    for forward, backward in (
        (aten._softmax.default, aten._softmax_backward_data.default),
        (aten._log_softmax.default, aten._log_softmax_backward_data.default),
    ):
        check_call(forward, x, dim, False, meshes=[mesh])
        check_call(backward, grad, forward(x, dim, False), dim, x.dtype, meshes=[mesh])


@pytest.mark.parametrize("op", [aten.softmax.int, aten.log_softmax.int, aten._safe_softmax.default])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_may_be_wider(op: Any, dtype: torch.dtype) -> None:
    """Under every strategy, softmax of float16 values to a wider dtype equals one device's."""
    check_splits(op, tensor(4, 6).half(), 1, dtype)
    check_splits(op, tensor(4, 6).half(), 0)


def test_masked_rows() -> None:
    """Under every strategy, softmax equals one device's if a piece or a whole row is minus infinity."""
    x = tensor(4, 7)
    x[0], x[1, :4], x[2, 5:] = -torch.inf, -torch.inf, -torch.inf
    for op in (aten._softmax.default, aten._log_softmax.default):
        check_splits(op, x, 1, False)
    check_splits(aten._safe_softmax.default, x, 1)


def test_half_precision_stays() -> None:
    """Under every strategy, softmax of bfloat16 values has one device's values and dtype."""
    check_splits(aten._softmax.default, tensor(4, 7).bfloat16(), 1, False)
    check_splits(aten._log_softmax.default, tensor(4, 7).bfloat16(), 1, False)


def test_integers_are_only_split_evenly() -> None:
    """Softmax of integers splits its own dim only evenly, because integer padding cannot be minus infinity."""
    counts = [
        len(strategies(aten.softmax.int, (torch.ones(4, size).long(), 1, torch.float32), {}, 2)) for size in (6, 7)
    ]
    assert counts[0] == counts[1] + 1


def test_the_rule_says_that_ranks_talk() -> None:
    """The rule says that a softmax communicates if its own dim is split, and not if another dim is."""
    x = tensor(4, 6)
    rule = bound_rule(aten._softmax.default, (x, 1, False), {}, [x])
    assert rule is not None
    assert rule.may_communicate("d1")
    assert not rule.may_communicate("d0")


def test_on_the_samples_of_pytorch() -> None:
    """On PyTorch's samples of softmax, every strategy has one device's results, forward and backward."""
    tally = check_database(["softmax", "log_softmax", "nn.functional.softmin"])
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.strategies > 50
