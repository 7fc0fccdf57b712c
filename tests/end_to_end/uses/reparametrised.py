"""Uses of torch's reparametrisations (spectral and weight norm, pruning) on layers of a compiled model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from tests.end_to_end.uses.use import Compile, Numbers, Use, numbers, on_both, train

Change = Callable[[nn.Module], Any]


def changed(change: Change, *, when: str = "after a call") -> Callable[[Compile], Numbers]:
    """Return a script that changes a layer before or after `compile`, or after a call, and then trains."""

    def script(compile: Compile) -> Numbers:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2))
        inputs = torch.randn(4, 8)
        if when == "before":
            change(model[0])
        compiled = compile(model)
        if when == "after a call":
            compiled(inputs)
        if when != "before":
            change(model[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = train(optimizer, lambda: compiled(inputs).square().mean())
        return numbers(*found, *model.parameters(), *model.buffers())

    return script


def removed_later(compile: Compile) -> Numbers:
    """Remove a weight norm from the compiled model after training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    parametrizations.weight_norm(model[0])
    compiled = compile(model)
    inputs = torch.randn(4, 8)
    before = compiled(inputs)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    return numbers(before, compiled(inputs))


prune_half = partial(prune.l1_unstructured, name="weight", amount=0.5)


def prune_for_good(layer: nn.Module) -> None:
    """Prune a layer, and make the zeros part of the weight itself."""
    prune_half(layer)
    prune.remove(layer, "weight")


_KINDS: tuple[tuple[str, Change], ...] = (
    ("spectral norm", parametrizations.spectral_norm),
    ("the older spectral norm", spectral_norm),
    ("weight norm", parametrizations.weight_norm),
    ("pruning", prune_half),
)
USES = (
    *(
        Use(f"{name} {when}{', on two ranks' * processes}", changed(change, when=when), processes=processes)
        for name, change in _KINDS
        for when, processes in (("before", False), ("after a call", False), ("after a call", True))
    ),
    Use("spectral norm after compile, on two ranks", changed(_KINDS[0][1], when="after compile"), processes=True),
    Use("orthogonal weights before, on two ranks", changed(parametrizations.orthogonal, when="before"), processes=True),
    Use("pruning for good", changed(prune_for_good)),
    Use(
        "pruning for good after a call, on two ranks",
        changed(prune_for_good),
        refused=r"\.data of 0\.weight was set",
        processes=True,
    ),
    *on_both("a weight norm taken away", removed_later),
)
