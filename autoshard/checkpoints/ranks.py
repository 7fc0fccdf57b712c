"""The processes that save and load together: an error of one is the same error on every rank.

Ranks meet over a `ControlChannel` before they communicate, as one may write for longer than another. So a rank at work
is waited for, and one that ended or hangs is named within a time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from autoshard.errors import AutoshardError, CheckpointError
from autoshard.runtime.agreement.control_channel import TIMEOUT_S, ControlChannel
from autoshard.runtime.agreement.lost_ranks import naming_lost_ranks
from autoshard.runtime.sharded_module import ShardedModule

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _FailedPart:
    """Why a rank could not do its part."""

    error: str


def _nothing() -> None:
    """Nothing to put right."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Processes that save and load together, this one among them.

    Args:
        group: a Gloo group of their own, so that a thread may communicate beside training; None for one process.
        channel: where they meet before they communicate; None for one process.
    """

    group: dist.ProcessGroup | None = None
    channel: ControlChannel | None = None

    @classmethod
    def of(cls, model: nn.Module, timeout_s: float | None = None) -> Ranks:
        """The processes that run `model`: those of its mesh, else all of this run. Called by all of them.

        Args:
            model: what is saved.
            timeout_s: how long ranks wait for one that shows no sign of life; None: as long as `model` does, else a
                minute.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        control = model.engine.control if isinstance(model, ShardedModule) else None
        if timeout_s is None:
            timeout_s = TIMEOUT_S if control is None else control.channel.timeout_s
        everyone = list(range(dist.get_world_size()))
        members = everyone if control is None else list(control.channel.ranks)
        channel = ControlChannel(members, timeout_s)
        channel.exchange(b"", "save or load checkpoints")
        with naming_lost_ranks():
            group = dist.new_group(
                members,
                timeout=timedelta(seconds=timeout_s),
                backend="gloo",
                use_local_synchronization=members != everyone,
            )
        return cls(group, channel) if isinstance(group, dist.ProcessGroup) else cls()

    @property
    def rank(self) -> int:
        """The place of this process among them."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many there are."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def do(self, what: str, mine: Callable[[], T]) -> T:
        """What each rank makes by itself, if all can.

        Raises:
            CheckpointError: on every rank, where one of them cannot.
        """
        return self.merge(what, mine, merge=lambda _: None, shared=lambda _: None)[0]

    def merge(
        self,
        what: str,
        mine: Callable[[], T],
        merge: Callable[[Sequence[Any]], R],
        undo: Callable[[], None] = _nothing,
        shared: Callable[[T], Any] = lambda value: value,
    ) -> tuple[T, R]:
        """What each rank makes, and what the first makes of all of that, on every rank.

        Args:
            what: names what is done, for the error.
            mine: what each rank makes by itself.
            merge: what the first rank makes of all ranks' in their order; small, as every rank gets it.
            undo: what the first rank does where a rank failed.
            shared: what of its own a rank sends to the first.

        Raises:
            CheckpointError: on every rank, with one text, where one of them cannot.
            LostRankError: a rank ended, or shows no sign of life.
        """
        try:
            with self._showing_life(what):
                value = mine()
                sent = shared(value)
        except Exception as error:
            text = self._settle(what, _FailedPart(_text_of(error)), merge, undo)
            raise CheckpointError(text.error if isinstance(text, _FailedPart) else str(text)) from error
        merged = self._settle(what, sent, merge, undo)
        if isinstance(merged, _FailedPart):
            raise CheckpointError(merged.error)
        return value, merged

    def _settle(self, what: str, sent: Any, merge: Callable[[Sequence[Any]], R], undo: Callable[[], None]) -> Any:
        """The first rank's result of the parts that all ranks sent, or `_FailedPart`; the same on every rank."""
        self._meet(what)
        everyone = self._to_first(sent)
        with self._showing_life(what):
            merged = None if everyone is None else _merged(what, everyone, merge, undo)
        self._meet(what)
        return self._from_first(merged)

    def _meet(self, what: str) -> None:
        """Wait for all ranks, as long as those that are missing show that they are at work."""
        if self.channel is not None:
            self.channel.exchange(b"", f"go on with {what[:1].lower()}{what[1:]}")

    def _showing_life(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self.channel is None else self.channel.showing_life(what)

    def _to_first(self, value: Any) -> list[Any] | None:
        """The values of all ranks, on the first."""
        if self.group is None:
            return [value]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with naming_lost_ranks():
            dist.gather_object(value, found, dst=dist.get_global_rank(self.group, 0), group=self.group)
        return found

    def _from_first(self, value: Any) -> Any:
        """The first rank's value, on all."""
        if self.group is None:
            return value
        held = [value]
        with naming_lost_ranks():
            dist.broadcast_object_list(held, src=dist.get_global_rank(self.group, 0), group=self.group)
        return held[0]


def _merged(what: str, everyone: Sequence[Any], merge: Callable[[Sequence[Any]], R], undo: Callable[[], None]) -> Any:
    failed = {rank: sent.error for rank, sent in enumerate(everyone) if isinstance(sent, _FailedPart)}
    if failed:
        undo()
        return _FailedPart(_describe(what, failed, len(everyone)))
    try:
        return merge(everyone)
    except Exception as error:  # noqa: BLE001  (it is raised on every rank)
        undo()
        return _FailedPart(_describe(what, {0: _text_of(error)}, 1))


def _describe(what: str, failed: dict[int, str], size: int) -> str:
    """One text of what went wrong on some ranks; ranks that say the same are named together."""
    by_text: dict[str, list[int]] = {}
    for rank, text in failed.items():
        by_text.setdefault(text, []).append(rank)
    told = "; ".join(text if size == 1 else f"ranks {ranks}: {text}" for text, ranks in list(by_text.items())[:_SHOWN])
    more = f"; and {len(by_text) - _SHOWN} more" if len(by_text) > _SHOWN else ""
    return f"{what} failed. {told}{more}"


_SHOWN = 4


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, AutoshardError) else f"{type(error).__name__}: {error}"
