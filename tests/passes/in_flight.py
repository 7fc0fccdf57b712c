"""Run graphs with collectives that finish late, so that early reads and writes show in the numbers.

The simulator finishes a collective at its start. Under `InFlight`, a result is garbage until its wait. The result stays
garbage if memory in flight was written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autoshard.ir.collectives import is_collective, is_wait

_GARBAGE = 77


class InFlight:
    """An `on_values` of `simulate` that makes the results of collectives garbage until their wait; one for each run."""

    def __init__(self) -> None:
        self._values: dict[fx.Node, list[Any]] = {}
        self._received: dict[fx.Node, list[Any]] = {}
        self._sent: dict[fx.Node, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, node: fx.Node, values: Any) -> None:
        """Note a node's values; give garbage for a collective's result, and the received value for a wait's."""
        self._values[node] = values
        if is_collective(node):
            self._start(node, values)
        elif is_wait(node) and node.args[0] in self._received:
            values[:] = self._arrived(node.all_input_nodes[0])

    def _start(self, node: fx.Node, values: list[Any]) -> None:
        self._received[node] = list(values)
        sent = [value for operand in node.all_input_nodes for value in self._values[operand]]
        self._sent[node] = [(value, value.clone()) for value in sent]
        values[:] = [_garbage(value) for value in values]

    def _arrived(self, started: fx.Node) -> list[Any]:
        is_intact = all(_is_same(*pair) for pair in self._sent[started])
        received = self._received[started]
        return list(received) if is_intact else [_garbage(value) for value in received]


def _garbage(value: Tensor) -> Tensor:
    return torch.full_like(value, float("nan") if value.is_floating_point() else _GARBAGE)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal numbers, and NaN at equal places."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.equal(one.nan_to_num(_GARBAGE), other.nan_to_num(_GARBAGE)) and torch.equal(one.isnan(), other.isnan())
