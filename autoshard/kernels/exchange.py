"""Operators that exchange rows between ranks while they run; the number of rows per rank may only then be known.

Such an operator is written as *steps*: a generator that yields each `Exchange` and receives the arrived rows. With a
process per rank, an all-to-all answers it (`run_steps`). The simulator answers all ranks of a group together
(`run_together`). Operands and results have static shapes; the exchanged rows need not.
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
        tensors: tensors of rows on dim 0, the rows for the first rank first.
        sent: the number of rows of each tensor for each rank.
        received: the number of rows from each rank.
        is_awaited: wait for the answer; else the steps wait for it by `arrived`.
    """

    tensors: Sequence[Tensor]
    sent: Sequence[int]
    received: Sequence[int]
    is_awaited: bool = True


Steps = Generator[Exchange, list[Tensor], Any]
"""Yields exchanges, receives the arrived rows of each tensor (the first rank's first), and returns the results.

The steps own the received list, so a tensor that they remove from it is freed.
"""


_STEPS: dict[OpOverload, Callable[..., Steps]] = {}

EXCHANGING: Mapping[OpOverload, Callable[..., Steps]] = MappingProxyType(_STEPS)
"""Operators that communicate inside, and their steps; a call's last argument is the group, which steps lack."""


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
    """Wait for tensors that are in transit; tensors that have arrived stay as they are."""
    return [_c10d.wait_tensor(tensor) for tensor in tensors]


def run_steps(steps: Steps, group: str) -> Any:
    """The results of one rank's steps; exchanges use the process group with torch's name `group`."""
    try:
        exchange = next(steps)
        while True:
            answer = _all_to_all(exchange, group)
            del exchange  # otherwise the sent tensors would stay until the next exchange
            exchange = steps.send(answer)
    except StopIteration as done:
        return done.value


def _all_to_all(exchange: Exchange, group: str) -> list[Tensor]:
    sizes = list(exchange.received), list(exchange.sent)
    started = [_c10d.all_to_all_single(tensor.contiguous(), *sizes, group) for tensor in exchange.tensors]
    return arrived(started) if exchange.is_awaited else started


def run_together(ranks: Sequence[Steps]) -> list[Any]:
    """The results of the steps of all ranks of a group, in rank order, run in this process.

    Raises:
        ValueError: a rank expects other numbers of rows than it is sent.
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
            raise ValueError(f"{len(exchanges)} of {len(ranks)} ranks exchange rows, but the others have ended.")
        arrived = [_arriving(exchanges, rank) for rank in range(len(ranks))]


def _arriving(exchanges: Sequence[Exchange], rank: int) -> list[Tensor]:
    """The rows that reach a rank, for each tensor."""
    sent = [exchange.sent[rank] for exchange in exchanges]
    if sent != list(exchanges[rank].received):
        raise ValueError(f"rank {rank} expects {list(exchanges[rank].received)} rows of each rank, but is sent {sent}.")
    parts = [[t.split(list(exchange.sent))[rank] for t in exchange.tensors] for exchange in exchanges]
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
