"""Uses of `torch.save` and copies of state: a whole file, or an error with the way to a whole file."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn

from autoshard import P
from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers

INPUTS = torch.arange(32.0).reshape(4, 8) / 32
WHOLE, PARTS = {"weight": P(), "bias": P()}, {"weight": P("data"), "bias": P()}


def _trained(compile: Compile, constraints: dict[str, P]) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = compile(model, optimizer=optimizer, loss_fn=nn.MSELoss(), constraints=constraints)
    step(INPUTS, torch.ones(4, 4))
    return model, optimizer


def _reread(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def a_file_of_wholes(compile: Compile) -> Numbers:
    """Save a file of whole values, which one device loads."""
    model, optimizer = _trained(compile, WHOLE)
    other = nn.Linear(8, 4)
    other.load_state_dict(_reread(model.state_dict()))
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    fresh.load_state_dict(_reread(optimizer.state_dict()))
    other(INPUTS).sum().backward()
    fresh.step()
    return numbers(*other.parameters())


def a_file_of_parts(compile: Compile) -> Numbers:
    """A rank holds rows of the weight alone."""
    model, _ = _trained(compile, PARTS)
    _reread(model.state_dict())
    return []


def a_file_of_an_optimizer_in_parts(compile: Compile) -> Numbers:
    """A rank holds averages of its rows alone."""
    _, optimizer = _trained(compile, PARTS)
    _reread({"optimizer": optimizer.state_dict(), "epoch": 1})
    return []


def the_best_state_in_memory(compile: Compile) -> Numbers:
    """The best state so far is a copy, to which training goes back."""
    model, _ = _trained(compile, PARTS)
    best = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(best)
    return numbers(*model.parameters())


USES = (
    Use("torch.save of whole states", a_file_of_wholes),
    Use("torch.save of whole states, on two ranks", a_file_of_wholes, processes=True),
    Use("torch.save of parts, on two ranks", a_file_of_parts, refused="is sharded.*full_state_dict", processes=True),
    Use("torch.save of an optimizer's parts", a_file_of_an_optimizer_in_parts, refused="is sharded", processes=True),
    Use("the best state in memory, on two ranks", the_best_state_in_memory, processes=True),
)
