"""Layers of experts with random numbers, as operands of `autoshard::experts`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from autoshard.kernels.gates import CLAMPED_SILU, NAMES


@dataclass(frozen=True)
class Layer:
    """Operands and constants of one call of `autoshard::experts`."""

    x: Tensor
    index: Tensor
    weights: Tensor
    gate_up: Tensor
    bias: Tensor | None
    down: Tensor
    activation: str
    transposed: bool
    interleaved: bool
    alpha: float = 1.7
    limit: float = 0.7

    @classmethod
    def drawn(
        cls, generator: torch.Generator, *, tokens: int = 6, chosen: int = 2, hidden: int = 4, count: int = 4,
        inner: int = 4, halves: int = 2, activation: str = "silu", transposed: bool = False, interleaved: bool = False,
        bias: bool = False, dtype: torch.dtype = torch.float64,
    ) -> Layer:  # fmt: skip
        """A layer with random numbers, in which a token's chosen experts differ."""

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype)

        index = torch.rand(tokens, count, generator=generator).argsort(1)[:, :chosen]
        pair = (inner, halves) if interleaved else (halves, inner)
        gate_up = numbers(count, hidden, *pair) if transposed else numbers(count, *pair, hidden)
        down = numbers(count, inner, hidden) if transposed else numbers(count, hidden, inner)
        return cls(
            numbers(tokens, hidden), index, numbers(tokens, chosen), gate_up, numbers(count, *pair) if bias else None,
            down, activation, transposed, interleaved,
        )  # fmt: skip

    @property
    def count(self) -> int:
        """How many experts there are."""
        return self.down.shape[0]

    @property
    def halves(self) -> int:
        """2 with a gate, 1 without."""
        return self.gate_up.numel() // self.down.numel()

    @property
    def trained(self) -> list[Tensor]:
        """The operands that have gradients."""
        operands = (self.x, self.weights, self.gate_up, self.bias, self.down)
        return [operand for operand in operands if operand is not None]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of `autoshard::experts`."""
        operands = (self.x, self.index, self.weights, self.gate_up, self.bias, self.down)
        return (*operands, self.count, self.activation, self.transposed, self.interleaved, self.alpha, self.limit)

    def requiring_gradients(self) -> Layer:
        """The same layer with copies of the tensors; those of floating point require gradients."""
        return self._map(lambda tensor: tensor.detach().clone().requires_grad_(tensor.is_floating_point()))

    def to(self, dtype: torch.dtype) -> Layer:
        """The same layer, detached, with its floating-point tensors in another type."""
        return self._map(lambda tensor: tensor.detach().to(dtype) if tensor.is_floating_point() else tensor)

    def _map(self, change: Any) -> Layer:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if isinstance(value, Tensor)})


@st.composite
def layers(draw: st.DrawFn, width: int | None = None) -> Layer:
    """Random layers of every kind. `width` sets the hidden and the intermediate size."""
    activation, halves = draw(st.sampled_from(NAMES)), draw(st.sampled_from([2, 1]))
    layer = Layer.drawn(
        torch.Generator().manual_seed(draw(st.integers(0, 99))),
        tokens=draw(st.sampled_from([6, 1, 5])), chosen=draw(st.sampled_from([2, 1, 3])),
        hidden=width or draw(st.sampled_from([4, 3])), count=draw(st.sampled_from([4, 3, 7])),
        inner=width or draw(st.sampled_from([4, 5])), halves=2 if activation == CLAMPED_SILU else halves,
        activation=activation, transposed=draw(st.booleans()), interleaved=draw(st.booleans()),
        bias=draw(st.booleans()),
    )  # fmt: skip
    strangers = draw(st.sampled_from([0, 0, -1, 10]))  # what no expert has in place of the first ones' tokens
    return replace(layer, index=torch.where(layer.index == 0, strangers, layer.index))
