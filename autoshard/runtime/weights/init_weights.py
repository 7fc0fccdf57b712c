"""Weights of a compiled model, computed by the initialisers of its modules; each rank computes its shards.

The operators of initialisers are recorded without values (`Compiler.record_initialisation`), and computed for the
rank's shards (`replay`). A random number depends on the seed, the number of the draw, and the element's global index.
So weights are equal, bit by bit, under every plan and on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from autoshard.errors import TraceError
from autoshard.ir.initialisation import Box, Initialisation
from autoshard.runtime.engine import NO_PIPELINE_RANKS, Engine
from autoshard.runtime.seeds import seed_of_weights
from autoshard.runtime.weights.local_part import LocalPart
from autoshard.runtime.weights.replay import Replay

Record = Callable[[], Initialisation]
"""Function that runs the initialisers of a model, and returns the record of their operations."""


@torch.no_grad()
def init_weights(
    model: nn.Module,
    engine: Engine,
    record: Record,
    seed: int,
    unset: Collection[str],
    only: Collection[str] | None = None,
    pipeline_rank_of: Mapping[str, int] = NO_PIPELINE_RANKS,
) -> None:
    """Initialise the weights of a model, which are sharded over ranks, by its modules' initialisers.

    All ranks must call.

    Args:
        model: the model.
        engine: the engine that shards its weights.
        record: returns the record of the model's initialisers.
        seed: the seed of random numbers.
        unset: names of the weights that have no values yet on some rank.
        only: names of the weights to initialise; None: all.
        pipeline_rank_of: name of a parameter → the pipeline rank that alone holds it.

    Raises:
        TraceError: an initialiser cannot be recorded, or an unset weight has no initialiser.
    """
    initialisation = record()
    engine.agree(lambda: {"init_weights(seed)": str(seed), "initialisation": initialisation.digest()})
    weights: dict[str, Any] = dict(model.named_parameters()) | dict(model.named_buffers())
    names = [name for name in weights if only is None or name in only]
    sources = initialisation.sources()
    _check_have_sources(names, sources, unset)
    device_seed = torch.full((), seed_of_weights(seed), dtype=torch.int64, device=engine.device)
    replay = Replay(
        initialisation, device_seed, lambda name: engine.global_copy(weights[name], pipeline_rank_of.get(name))
    )
    for name in _in_order(names, sources):
        _write(weights[name], name, replay)


def _write(weight: torch.Tensor, name: str, replay: Replay) -> None:
    """Write initial values into this rank's part of a weight, even if it is empty.

    A write increases the tensor's version, which marks the weight as set.
    """
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
            f"{f' and {more} more' if more > 0 else ''}, made on the meta device, and values from a constructor are "
            "lost there. Give the module a reset_parameters() that writes it, pass init_weights(seed, init_fn), or "
            "build that module in memory."
        )


def _in_order(names: list[str], sources: dict[str, frozenset[str]]) -> list[str]:
    """Return the names in an order in which each weight is written after all weights that read its old value.

    `sources` maps a weight to the weights from whose old values it is computed.

    Raises:
        TraceError: weights are computed from each other's old values.
    """
    waiting, result = dict.fromkeys(names), []
    while waiting:
        free = [name for name in waiting if not any(name in sources[other] for other in waiting if other != name)]
        if not free:
            raise TraceError(
                f"Initialisers compute {', '.join(map(repr, [*waiting][:_SHOWN]))} from each other's values, before "
                "either is initialised. Initialise them separately."
            )
        result += free
        waiting = {name: None for name in waiting if name not in free}
    return result


_SHOWN = 4
