"""Uses of checkpoints: a state of plain values is restored, and a value that needs pickle is refused."""

from __future__ import annotations

import random
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers


class Held:
    """Something with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Unknown:
    """A class of a user."""


def _folder() -> str:
    held = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(held)
    return held[0]


def _goes_on(state: Callable[[], Any], count: Callable[[Any], float]) -> Callable[[Compile], Numbers]:
    def script(compile: Compile) -> Numbers:
        torch.manual_seed(0)
        inputs = torch.randn(4, 3)
        model = compile(nn.Linear(3, 2), example_inputs=(inputs,))
        held = Held(state())
        checkpoints = autoshard.Checkpoints(_folder(), asynchronous=False)
        checkpoints.save(model, at=1, held=held)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        held.state = None
        checkpoints.load(model, held=held)
        return numbers(model(inputs).sum(), torch.tensor(count(held.state)))

    return script


_python = _goes_on(lambda: random.Random(3).getstate(), lambda state: float(sum(state[1]) % 1000))
_numpy = _goes_on(
    lambda: np.random.default_rng(3).bit_generator.state, lambda state: float(state["state"]["state"] % 1000)
)
_sparse = _goes_on(lambda: {"graph": torch.eye(3).to_sparse()}, lambda state: float(state["graph"].to_dense().sum()))
_containers = _goes_on(
    lambda: OrderedDict(seen=deque([1, 2], maxlen=2), keys={(1, "a"): {3, 4}}),
    lambda state: float(sum(state["seen"]) + sum(state["keys"][1, "a"]) + state["seen"].maxlen),
)
_average = _goes_on(lambda: {"mean": torch.ones(5), "n": 10**30}, lambda state: float(state["mean"].sum()))
_infinite = _goes_on(lambda: {"best": float("inf"), "half": torch.ones(2).bfloat16()}, lambda state: state["best"])


def an_own_class(compile: Compile) -> Numbers:
    """Save a value of the user's own class, which `torch.save` would pickle."""
    model = compile(nn.Linear(3, 2), example_inputs=(torch.ones(4, 3),))
    if isinstance(model, autoshard.ShardedModule):
        autoshard.Checkpoints(_folder(), asynchronous=False).save(model, at=1, held=Held({"a": Unknown()}))
    return []


USES = (
    Use("a checkpoint with Python's generator", _python),
    Use("a checkpoint with NumPy's generator", _numpy),
    Use("a checkpoint with a sparse tensor", _sparse),
    Use("a checkpoint with containers", _containers),
    Use("a checkpoint with a large number", _average),
    Use("a checkpoint with infinity", _infinite),
    Use("a checkpoint with an object", an_own_class, refused="only pickle can read"),
    Use("a checkpoint with containers, on two ranks", _containers, processes=True),
    Use("a checkpoint with a sparse tensor, on two ranks", _sparse, processes=True),
)
