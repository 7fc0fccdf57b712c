"""Uses of models that read Python state, such as lists and arrays, which changes in place between calls."""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, on_both


class _Slots:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class _Net(nn.Module):
    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.held, self.read = nn.Linear(8, 4), held, read

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.layer(inputs) * self.read(self.held)).square().mean()


def changed(
    make: Callable[[], Any], read: Callable[[Any], Any], change: Callable[[Any], Any]
) -> Callable[[Compile], Numbers]:
    """Return a script that trains a model and changes the state that it reads after each step."""

    def script(compile: Compile) -> Numbers:
        model = _Net(make(), read)
        inputs = torch.randn(8, 8)
        compiled = compile(model, example_inputs=(inputs,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            found.append(compiled(inputs))
            found[-1].backward()
            optimizer.step()
            change(model.held)
        return numbers(*found, *model.parameters())

    return script


def _write(held: Any) -> None:
    held[0] += 1


def _add(held: torch.Tensor) -> None:
    held.data += 1


USES = (
    Use("a deque that rolls", changed(lambda: deque([1.0, 2.0]), lambda d: d[0], lambda d: d.rotate(1))),
    Use("a running mean in a deque", changed(lambda: deque([1.0], maxlen=3), sum, lambda d: d.append(d[-1] / 2))),
    *on_both("a NumPy array in place", changed(lambda: np.ones(4), lambda a: float(a[0]), _write)),
    Use("a NumPy array made a tensor", changed(lambda: np.ones(4, "f4"), torch.from_numpy, _write)),
    Use("an array in place", changed(lambda: array.array("d", [1.0]), lambda a: a[0], _write)),
    Use("a bytearray in place", changed(lambda: bytearray([1]), lambda b: b[0], _write)),
    Use("a slot", changed(_Slots, lambda s: s.factor, lambda s: setattr(s, "factor", s.factor + 1))),
    Use("a tensor in a list, by data", changed(lambda: [torch.ones(4)], lambda t: t[0], lambda t: _add(t[0]))),
    Use("a tensor's NumPy array", changed(lambda: torch.ones(4), lambda t: t, lambda t: t.numpy().__iadd__(1))),
)
