"""Models of runs that are killed and started again: their batches, meshes and options of `compile`."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoshard import Mesh, P
from tests.examples.scripts import ROOT
from tests.models import LENGTH, llama, mixtral, words


class Net(nn.Module):
    """Two layers with dropout, whose output is a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.dropout(self.first(x).tanh(), 0.1, self.training)).square().mean()


def _along_data(ranks: int) -> Mesh:
    return Mesh({"data": ranks})


def _in_stages(ranks: int) -> Mesh:
    """A mesh with two pipeline stages, or without stages if the number of ranks is odd."""
    if ranks % 2:
        return Mesh({"data": ranks})
    return Mesh({"pipeline": 2, "data": ranks // 2} if ranks > 2 else {"pipeline": 2})


def _numbers(seed: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))}


def _words(seed: int) -> dict[str, torch.Tensor]:
    return words(seed=seed)


def _words_and_targets(seed: int) -> dict[str, torch.Tensor]:
    tokens = words(length=LENGTH + 1, seed=seed)["input_ids"]
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def _gpt() -> nn.Module:
    return runpy.run_path(str(ROOT / "examples" / "train_gpt.py"))["GPT"](layers=2, width=32, heads=4, length=LENGTH)


@dataclass(frozen=True, slots=True)
class Restarted:
    """A model to train.

    Args:
        make: makes the model, after a seed.
        batch: makes a batch from its number.
        mesh: makes the mesh of a number of ranks.
        options: further options of `compile`.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]
    mesh: Callable[[int], Mesh] = _along_data
    options: Mapping[str, Any] = field(default_factory=dict)


_SPLIT = P("data")
"""Weights, and in the GPT their state too, lie in other pieces on each number of ranks."""

MODELS: Mapping[str, Restarted] = {
    "net": Restarted(Net, _numbers),
    "gpt": Restarted(_gpt, _words_and_targets, options={"constraints": {"*weight": _SPLIT, "*:*weight": _SPLIT}}),
    "experts": Restarted(lambda: mixtral()[0], _words, options={"constraints": {"*.experts.*": _SPLIT}}),
    "stages": Restarted(lambda: llama(layers=2)[0], _words, _in_stages, {"micro_batches": 2}),
}
