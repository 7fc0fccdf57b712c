"""Uses of moving averages of a compiled model's parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers


def averaged(
    *,
    before_the_first_call: bool = True,
    updating: Callable[[], AbstractContextManager[None]] = nullcontext,
    **options: Any,
) -> Callable[[Compile], Numbers]:
    """Return a script that trains a model with batch norm beside an `AveragedModel`, and evaluates the average.

    Args:
        before_the_first_call: the average is made before the model has run.
        updating: the context of each update of the average.
        options: arguments of `AveragedModel`.
    """

    def script(compile: Compile) -> Numbers:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        compiled = compile(model)
        if not before_the_first_call:
            compiled(torch.randn(4, 8))
        average = AveragedModel(compiled, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            with updating():
                average.update_parameters(compiled)
        if not options.get("use_buffers"):
            update_bn([torch.randn(4, 8) for _ in range(2)], average)
        average.eval()
        return numbers(average(torch.ones(4, 8)), *average.parameters(), *average.buffers())

    return script


_MANY, _EACH = get_ema_multi_avg_fn(0.9), get_ema_avg_fn(0.9)
USES = (
    Use("an average with buffers", averaged(use_buffers=True, multi_avg_fn=_MANY)),
    Use("an average with buffers, tensor by tensor", averaged(use_buffers=True, avg_fn=_EACH)),
    Use("an average with buffers, on two ranks", averaged(use_buffers=True, avg_fn=_EACH), processes=True),
    Use(
        "an average with buffers, many at a time, on two ranks",
        averaged(use_buffers=True, multi_avg_fn=_MANY, updating=implicit_replication),
        processes=True,
    ),
    Use("an average with running sums of its own, on two ranks", averaged(multi_avg_fn=_MANY), processes=True),
    Use(
        "an average with buffers after a call, on two ranks",
        averaged(use_buffers=True, avg_fn=_EACH, before_the_first_call=False),
        processes=True,
    ),
)
