"""Layer norms with wider weights and group norms of an empty batch equal one device's under every strategy."""

from __future__ import annotations

import pytest
import torch

from tests.rules.recording import check_recorded, check_splits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_norm_of_split_rows(dtype: torch.dtype) -> None:
    """Under every strategy, a layer norm with float32 weights equals one device's, in float32 and bfloat16."""
    x, weight, bias = torch.randn(3, 4, dtype=dtype), torch.rand(4), torch.rand(4)
    check_splits(torch.ops.aten.native_layer_norm.default, x, [4], weight, bias, 1e-5)


def test_a_group_norm_of_an_empty_batch() -> None:
    """Under every strategy, a group norm of an empty batch and its gradients equal one device's."""
    x, weight = torch.randn(0, 4, 8, requires_grad=True), torch.rand(4, requires_grad=True)
    tried = check_recorded(lambda: torch.nn.functional.group_norm(x, 2, weight))
    assert "aten.native_group_norm_backward.default" in tried
