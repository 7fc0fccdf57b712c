"""A buffer whose shape is set by the first call is refused before this call, and traced after it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, PerChannelMinMaxObserver
from torch.nn import functional as F

from autoshard.errors import TraceError
from autoshard.tracing import trace


class Quantized(nn.Module):
    """A layer whose weight is fake-quantised by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        options = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric, "ch_axis": 0}
        self.quantize = FakeQuantize(PerChannelMinMaxObserver, -128, 127, **options)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.quantize(self.layer.weight), self.layer.bias).square().mean()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.ao.quantization")
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")
def test_buffers_that_the_first_call_sizes() -> None:
    """A buffer that the first call resizes is refused with its line. After one call of the model the trace works."""
    model, x = Quantized(), torch.ones(2, 4)
    with pytest.raises(
        TraceError, match=r"resizes a tensor of shape=.* at test_concrete.py.*call the model once before"
    ):
        trace(model, (x,))
    model(x)
    assert len(trace(model, (x,)).graph.nodes) > 10
