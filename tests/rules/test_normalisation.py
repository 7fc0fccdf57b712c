"""Normalisations of rows and groups: rows and groups are split, gradients of weights are sums over rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.rules.recording import check_recorded, check_splits

aten = torch.ops.aten


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@given(rows=st.lists(st.sampled_from([1, 2, 4]), max_size=2), width=st.sampled_from([2, 4]), affine=st.booleans())
def test_layer_norm(rows: list[int], width: int, affine: bool) -> None:
    """Forward and backward, with and without weights."""
    weight, bias = (_leaf(width), _leaf(width)) if affine else (None, None)
    tried = check_recorded(lambda: F.layer_norm(_leaf(*rows, width), (width,), weight, bias))
    assert {"aten.native_layer_norm.default", "aten.native_layer_norm_backward.default"} <= tried


def test_some_gradients_of_a_layer_norm() -> None:
    """Gradients that are not asked for leave no result."""
    x, weight, bias = torch.randn(4, 8), torch.randn(8), torch.randn(8)
    _, mean, rstd = aten.native_layer_norm(x, [8], weight, bias, 1e-5)
    for mask in ([True, True, False], [False, True, True], [True, False, False]):
        check_splits(aten.native_layer_norm_backward.default, x, x, [8], mean, rstd, weight, bias, mask)


def test_rms_norm() -> None:
    """The fused operator and its backward."""
    x, weight = torch.randn(4, 2, 8), torch.randn(8)
    check_splits(aten._fused_rms_norm.default, x, [8], weight, 1e-5)
    _, rstd = aten._fused_rms_norm(x, [8], weight, 1e-5)
    check_splits(aten._fused_rms_norm_backward.default, torch.randn_like(x), x, [8], rstd, weight, [True, True])


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("affine", [False, True])
def test_group_norm(groups: int, affine: bool) -> None:
    """Groups are split, and the channels of a group stay together."""
    weight, bias = (_leaf(8), _leaf(8)) if affine else (None, None)
    tried = check_recorded(lambda: F.group_norm(_leaf(4, 8, 3), groups, weight, bias))
    assert "aten.native_group_norm_backward.default" in tried


@pytest.mark.parametrize(
    "norm",
    [lambda x: F.instance_norm(x), lambda x: F.local_response_norm(x, 2), lambda x: F.normalize(x, dim=1)],
)
def test_others_are_composed(norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Other normalisations consist of operators with rules."""
    check_recorded(lambda: norm(_leaf(4, 8, 4)))
