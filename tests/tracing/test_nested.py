"""Nested tensors, whichever function makes them, are refused with the way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nested, nn
from torch.nested import nested_tensor_from_jagged

from autoshard.errors import TraceError
from autoshard.tracing import trace

_OFFSETS = torch.tensor([0, 3, 8])


class Call(nn.Module):
    """A model that applies a function to its parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(8, 4))

    def forward(self) -> Tensor:
        return self.function(self.weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: nested.nested_tensor_from_jagged(x, _OFFSETS),
        lambda x: nested_tensor_from_jagged(x, _OFFSETS),
        lambda x: nested.as_nested_tensor([x[:3], x[3:]], layout=torch.jagged),
        lambda x: nested.as_nested_tensor([x[:3], x[3:]]),
        lambda x: nested.nested_tensor([x[:3], x[3:]]),
        lambda x: nested.narrow(x[None], 1, torch.tensor([1]), torch.tensor([4]), layout=torch.jagged),
    ],
)
def test_refusal(make: Callable[[Tensor], Tensor]) -> None:
    """The error names the line that makes the nested tensor, and says to pad the rows."""
    with pytest.raises(TraceError, match=r"makes a nested tensor in forward at test_nested.*Pad the rows"):
        trace(Call(lambda x: nested.to_padded_tensor(make(x), 0.0).sum()))
