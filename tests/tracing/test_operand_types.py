"""What one device refuses, as operands have unlike types, is refused by name before it is planned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard import Cluster, Mesh
from autoshard.errors import TraceError
from autoshard.tracing.trace import trace

INTEGERS = torch.ones(4, 3, 8, dtype=torch.int64)


class Layers(nn.Module):
    """Two products, and what comes before them."""

    def __init__(self, cast: torch.dtype | None = None) -> None:
        super().__init__()
        self.wide, self.narrow, self.cast = nn.Linear(8, 16), nn.Linear(16, 4, bias=False), cast

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.cast is None else x.to(self.cast)
        return self.narrow(self.wide(x).relu()).square().mean()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float64])
def test_inputs_of_another_type_than_the_parameters_are_refused(dtype: torch.dtype) -> None:
    """As on one device, and with the names of the input, the parameters and the module, and the user's line."""
    x = INTEGERS.to(dtype)
    with pytest.raises(RuntimeError):
        Layers()(x)
    named = rf"of 'wide' at test_operand_types\.py:\d+ in forward takes .*input 'input:0' of {dtype}.*'wide.weight'"
    with pytest.raises(TraceError, match=named):
        trace(Layers(), (x,))


def test_products_of_one_type_are_traced() -> None:
    """Inputs that the model casts, and models in another type."""
    trace(Layers(torch.float32), (INTEGERS,))
    trace(Layers().double(), (INTEGERS.double(),))


def test_values_of_unlike_types_are_refused_by_their_nodes() -> None:
    """Where an operand is computed of several."""

    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x + y) @ x.to(torch.float64).T

    with pytest.raises(
        TraceError, match=r"takes the value 'add' of torch\.float32 and the value 'permute' of torch\.float64"
    ):
        trace(Product(), (torch.ones(2, 2), torch.ones(2, 2)))


def test_planning_compiling_and_pricing_refuse_alike() -> None:
    """Whatever is asked of such a call."""
    asked = {"example_inputs": (INTEGERS,), "optimizer": "adamw"}
    with pytest.raises(TraceError, match=r"matrix product .* of unlike types"):
        autoshard.plan(Layers(), Cluster("h100_sxm", 1, 2), mesh=Mesh({"data": 2}), **asked)
    with pytest.raises(TraceError, match=r"matrix product .* of unlike types"):
        autoshard.plan(Layers(), Cluster("h100_sxm", 1, 2), global_batch=8, **asked)
    with pytest.raises(TraceError, match=r"matrix product .* of unlike types"):
        autoshard.compile(Layers(), Mesh({"data": 2}), example_inputs=(INTEGERS,))
