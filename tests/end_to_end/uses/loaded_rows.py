"""Uses of `autoshard.data.sampler`, in which each rank loads only its rows and trains as one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoshard
from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, on_both, one_device

_Optimizer = Callable[[Any], torch.optim.Optimizer]


def loaded(optimizer: _Optimizer, *, rows: int = 8, **options: Any) -> Callable[[Compile], Numbers]:
    """Return a script that trains a classifier for two epochs, with some targets ignored."""

    def script(compile: Compile) -> Numbers:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
        targets = torch.randint(0, 3, (37,))
        targets[::5] = -100
        dataset = TensorDataset(torch.randn(37, 4), targets)
        example = dataset[:rows]
        step = compile(
            model, optimizer=optimizer(model.parameters()), loss_fn=F.cross_entropy, example_inputs=example, **options
        )
        if compile is one_device:
            sampler: Any = autoshard.data.RankSampler(37, autoshard.data.RankRows(rows), seed=3)
        else:
            sampler = autoshard.data.sampler(dataset, step, seed=3)
        found = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in DataLoader(dataset, batch_size=sampler.batch_size, sampler=sampler):
                found.append(step(*sampler.whole(batch)))
        return numbers(*found, *model.parameters())

    return script


_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
_ADADELTA = partial(torch.optim.Adadelta, lr=0.1)  # whose step is not traced
USES = (
    *on_both("rows of a step", loaded(_SGD)),
    *on_both("rows of a step of micro-batches", loaded(_SGD, micro_batches=2)),
    Use("rows of four micro-batches, on two ranks", loaded(_SGD, rows=16, micro_batches=4), processes=True),
    Use("rows that two ranks cannot share", loaded(_SGD, rows=6, micro_batches=2), processes=True),
    Use("rows of micro-batches by autograd, on two ranks", loaded(_ADADELTA, micro_batches=2), processes=True),
)
