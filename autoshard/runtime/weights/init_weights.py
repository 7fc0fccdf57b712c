"""Weights of a compiled model, made by the initialisers of its modules, each rank its part.

What initialisers do is recorded without values (`Compiler.record_initialisation`), and computed for the part that a
rank holds (`replay`). Random numbers depend on the seed, on the place of the draw among all draws of the model, and on
the global index of the element: so weights are the same, bit by bit, under every plan and on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from autoshard.errors import TraceError
from autoshard.ir.initialisation import Box, Initialisation
from autoshard.runtime.engine import NO_HOLDERS, Engine
from autoshard.runtime.seeds import seed_of_weights
from autoshard.runtime.weights.local_part import LocalPart
from autoshard.runtime.weights.replay import Replay

Record = Callable[[], Initialisation]


@torch.no_grad()
def init_weights(
    model: nn.Module,
    engine: Engine,
    record: Record,
    seed: int,
    unset: Collection[str],
    only: Collection[str] | None = None,
    holders: Mapping[str, int] = NO_HOLDERS,
) -> None:
    """Give the weights of a model the values that its initialisers give; called by all ranks.

    Args:
        model: the user's, as it lies on the ranks.
        engine: where it runs.
        record: records the initialisers.
        seed: of random numbers.
        unset: names of weights that have no value to keep, on any rank.
        only: names of the weights that are given values; None: all.
        holders: see `Engine.place`.

    Raises:
        TraceError: an initialiser cannot be recorded, or none gives a value to a weight that is unset.
    """
    initialisation = record()
    engine.agree(lambda: {"init_weights(seed)": str(seed), "initialisation": initialisation.digest()})
    weights: dict[str, Any] = dict(model.named_parameters()) | dict(model.named_buffers())
    names = [name for name in weights if only is None or name in only]
    sources = initialisation.sources()
    _check_have_sources(names, sources, unset)
    device_seed = torch.full((), seed_of_weights(seed), dtype=torch.int64, device=engine.device)
    replay = Replay(initialisation, device_seed, lambda name: engine.global_copy(weights[name], holders.get(name)))
    for name in _in_order(names, sources):
        _write(weights[name], name, replay)


def _write(weight: torch.Tensor, name: str, replay: Replay) -> None:
    """Write this rank's part of a weight, by one write in place whatever its size, as versions are compared."""
    part = LocalPart.of(weight)
    box = Box(part.offset, tuple(part.tensor.shape))
    for piece, value in replay.pieces(name, box, part.tensor):
        piece.of(part.tensor).copy_(value)


def _check_have_sources(names: list[str], sources: dict[str, frozenset[str]], unset: Collection[str]) -> None:
    missing = sorted({source for name in names for source in sources[name] if source in unset})
    if missing:
        more = len(missing) - _SHOWN
        raise TraceError(
            f"No initialiser gives a value to {', '.join(map(repr, missing[:_SHOWN]))}"
            f"{f' and {more} more' if more > 0 else ''}, made on the meta device: what a constructor writes is not "
            "repeated. Give the module a reset_parameters() that writes it, pass init_weights(seed, init_fn), or build "
            "that module in memory."
        )


def _in_order(names: list[str], sources: dict[str, frozenset[str]]) -> list[str]:
    """The weights in an order in which each is computed before what it is computed from is written over."""
    waiting, result = dict.fromkeys(names), []
    while waiting:
        free = [name for name in waiting if not any(name in sources[other] for other in waiting if other != name)]
        if not free:
            raise TraceError(
                f"Initialisers compute {', '.join(map(repr, [*waiting][:_SHOWN]))} from values of each other, before "
                "either is initialised. Give them values apart."
            )
        result += free
        waiting = {name: None for name in waiting if name not in free}
    return result


_SHOWN = 4
