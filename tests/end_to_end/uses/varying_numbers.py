"""Uses of models that compute with a Python number that changes at each call."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, on_both


class _Net(nn.Module):
    def __init__(self, factor: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor = nn.Linear(8, 4), factor
        self.step, self.loss, self.warm, self.config = 0, 0.0, 5, SimpleNamespace(step=0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(inputs)
        return (hidden * self.factor(self, hidden)).square().mean()


def counted(factor: Callable[[Any, torch.Tensor], Any], calls: int = 16) -> Callable[[Compile], Numbers]:
    """Return a script that sets a step number, and values derived from it, before each training step."""

    def script(compile: Compile) -> Numbers:
        model = _Net(factor)
        inputs = torch.randn(8, 8)
        compiled = compile(model, example_inputs=(inputs,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(calls):
            model.step = model.config.step = step
            model.loss, model.warm = step * 0.07, (step * 5) % 11
            optimizer.zero_grad()
            found.append(compiled(inputs))
            found[-1].backward()
            optimizer.step()
        return numbers(*found, *model.parameters())

    return script


def _every_tenth(net: Any, _: torch.Tensor) -> float:
    return 2.0 if net.step % 10 == 5 else 1.0


USES = (
    *on_both("every tenth step", counted(_every_tenth)),
    Use("a window of steps", counted(lambda net, _: 3 if 9 <= net.step < 12 else 1)),
    Use("one step", counted(lambda net, _: 2 if net.step == 12 else 1)),
    Use("an interval of a loss", counted(lambda net, _: 2 if 0.6 < net.loss < 0.8 else 1)),
    Use("a step and a length that changes too", counted(lambda net, _: 2 if net.step < net.warm else 1)),
    Use("a step in a configuration", counted(lambda net, _: 2 if net.config.step > 8 else 1)),
    Use("a warm-up", counted(lambda net, _: min(1.0, (net.step + 1) / 4))),
    Use("a cosine of a step", counted(lambda net, _: 1 + math.cos(net.step / 4), calls=6)),
    Use("a text of a step", counted(lambda net, _: 2 if str(net.step).endswith("5") else 1, calls=7)),
    Use("a step by its type", counted(lambda net, _: 2 if type(net.step) is int and net.step > 5 else 1, calls=8)),
    Use("a step by vars", counted(lambda net, _: 2 if vars(net)["step"] > 8 else 1)),
    Use("a tensor of a step", counted(lambda net, y: torch.full_like(y, net.step), calls=5)),
    Use("a column by the step", counted(lambda net, y: y[:, net.step % 3 : net.step % 3 + 1])),
    Use("a dropout of a step", counted(lambda net, y: F.dropout(torch.ones(4), min(net.step, 8) // 8), calls=12)),
)
