"""Norms over split rows equal norms over whole rows."""

from __future__ import annotations

import pytest
import torch

from tests.rules.recording import check_recorded, check_splits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_norm_of_split_rows(dtype: torch.dtype) -> None:
    """A layer norm of split rows takes weights in its own type or wider, and keeps mean and deviation."""
    x, weight, bias = torch.randn(3, 4, dtype=dtype), torch.rand(4), torch.rand(4)
    check_splits(torch.ops.aten.native_layer_norm.default, x, [4], weight, bias, 1e-5)


def test_a_group_norm_of_an_empty_batch() -> None:
    """A group norm may be split over its channels, forward and backward, although the batch is empty."""
    x, weight = torch.randn(0, 4, 8, requires_grad=True), torch.rand(4, requires_grad=True)
    tried = check_recorded(lambda: torch.nn.functional.group_norm(x, 2, weight))
    assert "aten.native_group_norm_backward.default" in tried
