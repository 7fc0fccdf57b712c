"""Models whose code keeps tensors in a `functools.lru_cache`, in a global, in a class or in a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard


def _cached_where_eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a cached function, as position embeddings of transformers do."""
    cached = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return cached(*args)

    return call


@functools.lru_cache
def _positions(length: int) -> Tensor:
    return torch.arange(float(length))


@_cached_where_eager
def _wrapped_positions(length: int) -> Tensor:
    return torch.arange(float(length))


class _Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Direct(_Positioned):
    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * _positions(x.shape[-1])).square().mean()


class Wrapped(_Positioned):
    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * _wrapped_positions(x.shape[-1])).square().mean()


class Method(_Positioned):
    @_cached_where_eager
    def positions(self, length: int) -> Tensor:
        return torch.arange(float(length))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.positions(x.shape[-1])).square().mean()


class Static(_Positioned):
    @staticmethod
    @functools.lru_cache
    def positions(length: int) -> Tensor:
        return torch.arange(float(length))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.positions(x.shape[-1])).square().mean()


_TABLES: dict[int, tuple[Tensor, list[Tensor]]] = {}


class InGlobal(_Positioned):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-1]
        if length not in _TABLES:
            _TABLES[length] = (torch.arange(float(length)), [torch.ones(length)])
        positions, (ones,) = _TABLES[length]
        return (self.linear(x) * positions * ones).square().mean()


class InClass(_Positioned):
    positions: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None:
            InClass.positions = torch.arange(float(x.shape[-1]))
        return (self.linear(x) * self.positions).square().mean()


def _remembered(length: int) -> Tensor:
    if not hasattr(_remembered, "positions"):
        _remembered.positions = torch.arange(float(length))  # type: ignore[attr-defined]
    return _remembered.positions  # type: ignore[attr-defined]


class InFunction(_Positioned):
    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * _remembered(x.shape[-1])).square().mean()


def _forget() -> None:
    _TABLES.clear()
    InClass.positions = None
    vars(_remembered).clear()


@pytest.mark.parametrize("kind", [Direct, Wrapped, Method, Static, InGlobal, InClass, InFunction])
@pytest.mark.parametrize("was_called", [False, True])
def test_a_cached_tensor_is_neither_kept_from_nor_for_a_trace(kind: type[nn.Module], was_called: bool) -> None:
    """A trace neither uses nor leaves cached tensors: the loss equals one device's, and the model can
    still be called."""
    _forget()
    model, x = kind(), torch.randn(4, 4)
    expected = model(x).item() if was_called else None
    loss = autoshard.compile(model, autoshard.Mesh({"data": 2}))(x)
    after = model(x).item()
    assert loss.item() == pytest.approx(after)
    assert expected in (None, after)
