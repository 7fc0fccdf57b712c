"""Buffers of a traced model must keep their shapes and types."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.errors import TraceError
from autoshard.tracing import trace


class Average(nn.Module):
    """A model that assigns a running average to its buffer."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.register_buffer("average", start)

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.average * 0.5 + x.mean(0)
        return x - self.average


@pytest.mark.parametrize(
    ("start", "before"),
    [
        (torch.zeros(4, dtype=torch.int64), r"\(4,\), torch\.int64"),
        (torch.tensor(0.0), r"\(\), torch\.float32"),
        (torch.zeros(1), r"\(1,\), torch\.float32"),
    ],
)
def test_an_assigned_tensor_of_another_shape_or_type_is_refused(start: Tensor, before: str) -> None:
    """A buffer to which forward assigns a tensor of another shape or type is refused with both."""
    expected = rf"assigns 'average' of shape={before}, a tensor of shape=\(4,\), torch\.float32, in forward"
    with pytest.raises(TraceError, match=expected):
        trace(Average(start), (torch.rand(3, 4),), grad=False)
