"""The cases of `tests.benchmarks.step_time`: small transformers with random weights, and their comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import build, words

VOCABULARY, LABELS, PATCH = 2048, 10, 16
Batch = dict[str, Tensor]

_SMALL: dict[str, Any] = {"layers": 4, "width": 256, "heads": 8, "words": VOCABULARY}
_MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {**_SMALL, "dropout": 0.0}),
    "llama": ("llama", {**_SMALL, "inner": 688}),
    "bert": ("bert", {**_SMALL, "inner": 1024, "length": 1024, "dropout": 0.0}),
    "vit": ("vit", {"layers": 4, "width": 256, "heads": 8, "inner": 1024, "patch_size": PATCH, "num_labels": LABELS}),
    "llama-60m": ("llama", {"layers": 8, "width": 512, "heads": 8, "inner": 1408, "words": 32_000}),
}
"""Architecture and sizes by name. Dropout is off: its masks are drawn by other generators on each side."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model on batches of one shape. For images, `tokens` are the patches and the class token."""

    model: str
    tokens: int
    batch: int

    @property
    def image_size(self) -> int:
        """Pixels of a side."""
        return PATCH * round((self.tokens - 1) ** 0.5)


_BATCHES = {"vit": ((197, 8), (1025, 4)), "llama-60m": ((128, 8), (1024, 2))}
CASES: tuple[Case, ...] = tuple(
    Case(model, tokens, batch) for model in _MODELS for tokens, batch in _BATCHES.get(model, ((128, 8), (1024, 4)))
)


def make_model(case: Case) -> nn.Module:
    """Return the case's model in training, with equal random weights at each call."""
    kind, sizes = _MODELS[case.model]
    return build(kind, **sizes, **({"image_size": case.image_size} if kind == "vit" else {})).train()


def make_batches(case: Case, count: int) -> list[Batch]:
    """Return global batches, equal on every rank."""
    return [_make_batch(case, seed) for seed in range(1, count + 1)]


def _make_batch(case: Case, seed: int) -> Batch:
    if case.model != "vit":
        return words(case.batch, case.tokens, VOCABULARY, seed)
    pixels = torch.randn(case.batch, 3, *[case.image_size] * 2, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "labels": (torch.arange(case.batch) + seed) % LABELS}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A plan of ours and its rivals, each with the target for the ratio of step times.

    With `best` (a target), our plan is compared with the fastest rival alone.
    """

    ours: str
    rivals: Mapping[str, float] = field(default_factory=dict)
    best: float | None = None
    ranks: int = 2

    @property
    def contenders(self) -> list[str]:
        """The names of all contenders, ours first."""
        return [self.ours, *self.rivals]


COMPARISONS: Mapping[str, Comparison] = {
    "data": Comparison("data-parallel plan", {"DDP": 1.0}),
    "sharded": Comparison("fully sharded plan", {"FSDP2": 0.95}),
    "tensor": Comparison("tensor-parallel plan", {"DTensor": 0.75}),
    "free": Comparison("free choice", {"DDP": 0.95, "FSDP2": 0.95, "DTensor": 0.95}, best=0.95),
    "one": Comparison("mesh of one", {"eager": 1.0}, ranks=1),
    "inductor": Comparison("mesh of one, inductor", {"torch.compile": 1.0}, ranks=1),
}
"""Comparisons by the names of `--contenders`."""
