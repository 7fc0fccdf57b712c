"""Operators that exchange rows between ranks while they run. The number of rows may depend on the operands' values.

Such an operator is written as *steps*: a generator that yields an `Exchange` for each communication and receives the
arrived rows. `run_steps` runs them with one process per rank, `run_together` for all ranks in the simulator. Operands
and results have static shapes.
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
    """One all-to-all of a rank with the ranks of its group.

    Args:
        tensors: the rows to send. In each tensor, rows for the first rank come first.
        sent: for each rank of the group, the number of rows of each tensor that go to this rank.
        received: for each rank of the group, the number of rows of each tensor that come from this rank.
        is_awaited: whether the received rows have arrived when the generator gets their tensors. If False, the
            generator must pass the tensors to `arrived` before it reads them.
    """

    tensors: Sequence[Tensor]
    sent: Sequence[int]
    received: Sequence[int]
    is_awaited: bool = True


Steps = Generator[Exchange, list[Tensor], Any]
"""A generator that yields exchanges and returns the operator's results.

After each exchange, the generator receives a list with the arrived rows of each tensor. Rows from the first rank come
first. Only the generator holds this list, so a tensor that it removes from the list is freed.
"""


_STEPS: dict[OpOverload, Callable[..., Steps]] = {}

EXCHANGING: Mapping[OpOverload, Callable[..., Steps]] = MappingProxyType(_STEPS)
"""From an operator that communicates to the function that makes its steps.

The operator's last argument is the name of the group. The function takes all other arguments.
"""


def define_exchanging(
    name: str, schema: str, steps_of: Callable[..., Steps], fake: Callable[..., object]
) -> OpOverload:
    """Define the operator `autoshard::name`, whose last argument is `str group`, the name of the process group.

    `steps_of` takes the operator's arguments without the group, and returns one rank's steps. `fake` takes all
    arguments, and returns empty tensors like the results.
    """

    def run(*args: Any) -> Any:
        return run_steps(steps_of(*args[:-1]), args[-1])

    operator = define(name, schema, run, fake)
    _STEPS[operator] = steps_of
    return operator


def arrived(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Wait for tensors of an exchange that is not awaited (`Exchange.is_awaited`), and return them."""
    return [_c10d.wait_tensor(tensor) for tensor in tensors]


def run_steps(steps: Steps, group: str) -> Any:
    """Run this process's steps, and return the operator's results.

    Each exchange is an all-to-all in torch's process group with the name `group`.
    """
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
    """Run the steps of all ranks of a group in this process, and return the results of each rank.

    Raises:
        ValueError: a rank expects other numbers of rows than it is sent, or some ranks end before other ranks.
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
    """Return the rows that `rank` receives, one tensor for each exchanged tensor, with rows of the first rank first.

    `exchanges` has the current exchange of each rank. Raise `ValueError` if `rank` expects other numbers of rows.
    """
    sent = [exchange.sent[rank] for exchange in exchanges]
    if sent != list(exchanges[rank].received):
        raise ValueError(f"rank {rank} expects {list(exchanges[rank].received)} rows of each rank, but is sent {sent}.")
    parts = [[t.split(list(exchange.sent))[rank] for t in exchange.tensors] for exchange in exchanges]
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
