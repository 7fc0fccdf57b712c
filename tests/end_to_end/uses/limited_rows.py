"""Uses of tables whose rows have a largest norm."""

from __future__ import annotations

import torch
from torch import nn

from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, one_device


def max_norm(compile: Compile) -> Numbers:
    """torch's own `max_norm`, which writes over the table in `forward`."""
    torch.manual_seed(0)
    model = nn.Embedding(6, 4, max_norm=1.0)
    return numbers(compile(model)(torch.arange(6)))


def scaled_between_calls(compile: Compile) -> Numbers:
    """The table is scaled before each call, as the refusal of `max_norm` says; one device has `max_norm`."""
    torch.manual_seed(0)
    is_one = compile is one_device
    model = nn.Embedding(6, 4, max_norm=1.0 if is_one else None)
    compiled = compile(model)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.5)
    found = []
    for _ in range(3):
        if not is_one:
            with torch.no_grad():
                weight = compiled.weight
                weight.mul_((1.0 / weight.norm(dim=1, keepdim=True)).clamp(max=1))
        optimizer.zero_grad()
        loss = (compiled(torch.arange(6)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss)
    return numbers(*found)


USES = (
    Use("a table with max_norm", max_norm, refused=r"An embedding with max_norm= goes without it"),
    Use("a table scaled before each call", scaled_between_calls),
    Use("a table scaled before each call, on two ranks", scaled_between_calls, processes=True),
)
