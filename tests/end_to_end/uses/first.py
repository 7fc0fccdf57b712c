"""Uses of a plain loop."""

from __future__ import annotations

import torch
from torch import nn

from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers


def gradient_scaler(compile: Compile) -> Numbers:
    """Scale a loss by a constant, as GradScaler does, and divide the gradients by the constant."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    inputs = torch.randn(8, 8)
    compiled = compile(model, example_inputs=(inputs,))
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = compiled(inputs).square().mean()
        (loss * 1024).backward()
        for parameter in compiled.parameters():
            parameter.grad /= 1024
        optimizer.step()
        losses.append(loss)
    return numbers(*losses)


USES = (
    Use("a scaled loss", gradient_scaler),
    Use("a scaled loss, on two ranks", gradient_scaler, processes=True),
)
