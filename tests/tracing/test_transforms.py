"""Transforms of `torch.func` inside a model draw as in eager, and a failed trace leaves no transform active."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.nn import functional as F

from autoshard.errors import TraceError
from autoshard.tracing import trace
from autoshard.tracing.transforms import is_transformed
from tests.tracing.running import run_program


class Call(nn.Module):
    """A model that applies a function to its parameter of ones."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(4, 64))

    def forward(self) -> Any:
        return self.function(self.weight)


def _drop(row: Tensor) -> Tensor:
    return F.dropout(row, 0.25)


def _attend(row: Tensor) -> Tensor:
    x = row.view(1, 1, 64, 1)
    return F.scaled_dot_product_attention(0 * x, 0 * x, x, dropout_p=0.25).view(64)


def _gradient(row: Tensor) -> Tensor:
    return grad(lambda value: _drop(value).sum())(row)


@pytest.mark.parametrize("draw", [_drop, _attend, _gradient])
def test_randomness_of_vmap(draw: Callable[[Tensor], Tensor]) -> None:
    """With randomness "different" the rows of a vmap draw separately, with "same" equally, and without the option
    the trace is refused."""
    for randomness in ("different", "same"):
        model = Call(lambda weight, mode=randomness: vmap(draw, randomness=mode)(weight))
        (result, *_) = run_program(trace(model), model, ()).values()
        assert bool((result == result[0]).all()) is (randomness == "same")
        assert 0.8 < float(result.mean()) < 1.2
    with pytest.raises(TraceError, match="randomness"):
        trace(Call(vmap(draw)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, of jvp
def test_a_failing_trace_leaves_no_transform_open() -> None:
    """A trace that fails within a transform leaves no transform active, and transforms work afterwards."""

    def fail(weight: Tensor) -> Tensor:
        raise RuntimeError("the model fails")

    for function in (vmap(grad(fail)), lambda weight: jvp(fail, (weight,), (weight,))[1]):
        with pytest.raises(TraceError, match="the model fails"):
            trace(Call(function))
        assert not is_transformed()
    assert jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))[1].item() == 1.0
