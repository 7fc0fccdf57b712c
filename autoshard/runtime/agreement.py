"""Ranks agree, or all of them raise.

Ranks that run different programs would hang or, worse, compute nonsense. Before a program runs, each rank
tells all others what it is about to do; any difference is an error on every rank. Messages go over a Gloo
group of their own with a timeout, so a rank that never comes is an error too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from autoshard.errors import AutoshardError, RankMismatchError
from autoshard.runtime.engine import Engine

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)


class ControlGroup:
    """A process group of all `ranks` for small Python objects."""

    def __init__(self, ranks: list[int], timeout: timedelta = TIMEOUT) -> None:
        self._ranks = ranks
        self._group: Any = dist.new_group(ranks, timeout=timeout, backend="gloo")

    def agree(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """Raise `RankMismatchError` on every rank unless all ranks hold the same `facts`."""
        everyone = self._gather(dict(facts()))
        names = dict.fromkeys(name for theirs in everyone for name in theirs)
        differing = [name for name in names if len({theirs.get(name) for theirs in everyone}) > 1]
        if differing:
            raise RankMismatchError(
                f"Ranks disagree about {', '.join(differing[:_SHOWN])}"
                f"{f' and {len(differing) - _SHOWN} more' if len(differing) > _SHOWN else ''}. "
                + "; ".join(self._describe(name, everyone) for name in differing[:_SHOWN])
                + ". Every rank must build the same model (same seed, or the same checkpoint), and call it alike."
            )

    def share(self, compute: Callable[[], T]) -> T:
        """What `compute` gives on the first rank, on every rank; an error of it is raised on every rank."""
        mine: list[Any] = [None]
        if dist.get_rank() == self._ranks[0]:
            try:
                mine = [compute()]
            except AutoshardError as error:
                mine = [error]
        self._communicate(lambda: dist.broadcast_object_list(mine, src=self._ranks[0], group=self._group))
        if isinstance(mine[0], AutoshardError):
            raise mine[0]
        return mine[0]

    def _gather(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * len(self._ranks)
        self._communicate(lambda: dist.all_gather_object(everyone, value, group=self._group))
        return everyone

    def _communicate(self, exchange: Callable[[], None]) -> None:
        try:
            exchange()
        except RuntimeError as error:
            raise RankMismatchError(
                f"Rank {dist.get_rank()} waited for all of ranks {self._ranks} to compile the same program, and not "
                f"all came: another rank failed, or was called in another order. Look for its error first. ({error})"
            ) from error

    def _describe(self, name: str, everyone: list[dict[str, str]]) -> str:
        """`seed: 0 on ranks [0, 1], 1 on ranks [2]`."""
        holders: dict[str, list[int]] = {}
        for rank, theirs in zip(self._ranks, everyone, strict=True):
            holders.setdefault(theirs.get(name, "nothing"), []).append(rank)
        return f"{name}: " + ", ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items())


_SHOWN = 4


def make_together(engine: Engine, step: str, make: Callable[[], T], facts: Callable[[T], Mapping[str, str]]) -> T:
    """What each rank makes by itself, if all can, and of what is made the same `facts` hold.

    Raises:
        RankMismatchError: on every rank, if only some can, or the facts differ.
        AutoshardError: what `make` raises, if it does so on every rank.
    """
    made: T | None = None
    failure: AutoshardError | None = None
    try:
        made = make()
    except AutoshardError as error:
        failure = error
    found = {} if made is None else facts(made)
    engine.agree(lambda: {step: "succeeded" if failure is None else f"failed ({failure})", **found})
    if made is None:
        assert failure is not None
        raise failure
    return made
