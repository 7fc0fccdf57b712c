"""Operators of ours that exchange rows between ranks while they run: to which rank how many go may be known only then.

Such an operator is written down once, as *steps*: a generator that yields each `Exchange` and gets what arrived. With a
process per rank an all-to-all answers it (`run_steps`); the simulator answers all ranks of a group together
(`run_together`). Operands and results have static shapes, what travels in between need not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from autoshard.kernels.library import define

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows for each rank of a group.

    Args:
        tensors: each has the rows for the first rank first, on dim 0.
        sent: how many rows of each tensor are for which rank.
        received: how many come from which.
        is_awaited: else the answer is still on its way, until it is asked for by `arrived`.
    """

    tensors: Sequence[Tensor]
    sent: Sequence[int]
    received: Sequence[int]
    is_awaited: bool = True


Steps = Generator[Exchange, list[Tensor], Any]
"""Yields exchanges, gets for each tensor what came, the first rank's rows first; returns the operator's results.

The list is the steps' own: what they take off it is held by nobody else.
"""


_STEPS: dict[OpOverload, Callable[..., Steps]] = {}

EXCHANGING: Mapping[OpOverload, Callable[..., Steps]] = MappingProxyType(_STEPS)
"""Operators that communicate within, and their steps; the last argument of a call is the group, which steps lack."""


def define_exchanging(
    name: str, schema: str, steps_of: Callable[..., Steps], fake: Callable[..., object]
) -> OpOverload:
    """Define an operator by its steps, as `define` does by a function; the last argument of `schema` is the group."""

    def run(*args: Any) -> Any:
        return run_steps(steps_of(*args[:-1]), args[-1])

    operator = define(name, schema, run, fake)
    _STEPS[operator] = steps_of
    return operator


def arrived(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Wait for tensors that are on their way; those that are there already stay as they are."""
    return [_c10d.wait_tensor(tensor) for tensor in tensors]


def run_steps(steps: Steps, group: str) -> Any:
    """The results of one rank's steps, whose exchanges go over the process group that torch knows as `group`."""
    try:
        exchange = next(steps)
        while True:
            answer = _all_to_all(exchange, group)
            del exchange  # else what was sent would stay until the next one
            exchange = steps.send(answer)
    except StopIteration as done:
        return done.value


def _all_to_all(exchange: Exchange, group: str) -> list[Tensor]:
    sizes = list(exchange.received), list(exchange.sent)
    started = [_c10d.all_to_all_single(tensor.contiguous(), *sizes, group) for tensor in exchange.tensors]
    return arrived(started) if exchange.is_awaited else started


def run_together(ranks: Sequence[Steps]) -> list[Any]:
    """The results of the steps of all ranks of a group, in order, in this process.

    Raises:
        ValueError: a rank expects other rows than it is sent.
    """
    results: list[Any] = [None] * len(ranks)
    arrived: list[list[Tensor] | None] = [None] * len(ranks)
    while True:
        exchanges: list[Exchange] = []
        for rank, steps in enumerate(ranks):
            try:
                exchanges.append(next(steps) if arrived[rank] is None else steps.send(arrived[rank] or []))
            except StopIteration as done:
                results[rank] = done.value
        if not exchanges:
            return results
        if len(exchanges) != len(ranks):
            raise ValueError(f"{len(exchanges)} of {len(ranks)} ranks exchange rows, others have ended.")
        arrived = [_arriving(exchanges, rank) for rank in range(len(ranks))]


def _arriving(exchanges: Sequence[Exchange], rank: int) -> list[Tensor]:
    """Rows that reach a rank, for each tensor."""
    sent = [exchange.sent[rank] for exchange in exchanges]
    if sent != list(exchanges[rank].received):
        raise ValueError(f"rank {rank} expects {list(exchanges[rank].received)} rows of each rank, and is sent {sent}.")
    parts = [[t.split(list(exchange.sent))[rank] for t in exchange.tensors] for exchange in exchanges]
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
