"""A compiled step calls no more copies, casts, additions, views and reads of values than an eager step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from tests.models import build, vit, words
from tests.runtime.dispatch import RecordDispatch
from tests.runtime.processes import on_processes

SIZES: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "inner": 64, "words": 64, "length": 32}
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    **{name: partial(build, name, dropout=0.0, **SIZES) for name in ("bert", "gpt2", "llama")},
    "vit": lambda: vit(layers=2, size=16)[0],
}

KINDS: Mapping[str, tuple[str, ...]] = {
    "copies": ("clone", "copy_", "contiguous"),
    "casts": ("_to_copy",),
    "additions": ("add", "add_", "_foreach_add_"),
    "views": (
        *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "slice", "select"),
        *("detach", "alias"),
    ),
    "values read by Python": ("_local_scalar_dense",),
}


def counts_of(step: Callable[[], object]) -> Counter[str]:
    """Return how often a step calls operators of each kind of `KINDS`, after three steps."""
    for _ in range(3):
        step()
    with RecordDispatch() as recorded:
        step()
    assert not recorded.on_dtensors
    names = Counter(name.split(".")[1] for name in recorded.local if name.startswith("aten."))
    return Counter({kind: sum(names[name] for name in members) for kind, members in KINDS.items()})


def check(name: str) -> None:
    make, batch = MODELS[name], vit(size=16)[1] if name == "vit" else words(2, 16, 64)
    by_hand = make().train()
    optimizer = torch.optim.AdamW(by_hand.parameters(), fused=True)

    def step_by_hand() -> None:
        by_hand(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    model = make().train()
    step = autoshard.compile(model, mesh, optimizer=torch.optim.AdamW(model.parameters(), fused=True))
    eager, compiled = counts_of(step_by_hand), counts_of(lambda: step(**batch))
    over = {kind: (compiled[kind], eager[kind]) for kind in KINDS if compiled[kind] > eager[kind]}
    assert not over, f"compiled and eager: {over}; all: {dict(compiled)}, {dict(eager)}"


CHECKS = {name: partial(check, name) for name in MODELS}

test_no_more_than_eager = on_processes(CHECKS, ranks=1, sample=2)
