"""A use of checkpoints with a user's own state of containers and a sparse tensor."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import torch
from torch import nn

import autoshard
from tests.end_to_end.uses.use import Compile, Numbers, numbers, on_both
from tests.runtime.processes import new_folder


class Held:
    """An object whose state a checkpoint saves and loads."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def containers(compile: Compile) -> Numbers:
    """Save a model with a state of containers and a sparse tensor, clear both, and load them."""
    torch.manual_seed(0)
    inputs = torch.randn(4, 3)
    model = compile(nn.Linear(3, 2), example_inputs=(inputs,))
    held = Held(OrderedDict(seen=deque([1, 2], maxlen=2), keys={(1, "a"): {3, 4}}, graph=torch.eye(3).to_sparse()))
    checkpoints = autoshard.Checkpoints(str(new_folder()), asynchronous=False)
    checkpoints.save(model, at=1, held=held)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    held.state = None
    checkpoints.load(model, held=held)
    state = held.state
    return numbers(model(inputs).sum(), state["graph"].to_dense().sum(), *state["seen"], *state["keys"][1, "a"])


USES = on_both("a checkpoint with containers", containers)
