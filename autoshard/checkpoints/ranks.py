"""The processes that save and load together. If one rank fails, every rank raises the same error.

One rank may write for longer than another rank. So ranks first meet over a `ControlChannel`, and then communicate. A
rank that shows no sign of life for a time limit is named in an error on all ranks.
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
from autoshard.runtime.agreement.control_group import ControlGroup
from autoshard.runtime.agreement.lost_ranks import naming_lost_ranks
from autoshard.runtime.sharded_module import ShardedModule

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _FailedPart:
    """The error text that a failed rank sends in place of its result."""

    error: str


def _nothing() -> None:
    """Undo nothing; the default of `undo`."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Processes that save and load together, as seen by this process.

    Args:
        group: a Gloo group for checkpoints alone, so that a thread may communicate beside training; None for one
            process.
        channel: the channel on which ranks meet before they communicate; None for one process.
    """

    group: dist.ProcessGroup | None = None
    channel: ControlChannel | None = None

    @classmethod
    def of(cls, model: nn.Module, timeout_s: float | None = None) -> Ranks:
        """Return the processes that run `model`: the ranks of its mesh, or all processes for a plain module.

        All of these processes must call `of`.

        Args:
            timeout_s: seconds to wait for a rank that shows no sign of life. Default: the timeout of `model`, or 60.
        """
        control = control_of(model, timeout_s)
        if control is None:
            return cls()
        channel = control.channel
        channel.exchange(b"", "save or load checkpoints")
        with naming_lost_ranks():
            group = dist.new_group(
                list(channel.ranks),
                timeout=timedelta(seconds=channel.timeout_s),
                backend="gloo",
                use_local_synchronization=len(channel.ranks) != dist.get_world_size(),
            )
        return cls(group, channel) if isinstance(group, dist.ProcessGroup) else cls()

    @property
    def rank(self) -> int:
        """The rank of this process in the group of saving ranks; 0 without a group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """The number of processes that save and load together."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def do(self, action: str, mine: Callable[[], T]) -> T:
        """Run `mine` on each rank, and return this rank's result.

        If one rank fails, every rank raises `CheckpointError`. `action` says what failed, in the error's text.
        """
        return self.merge(action, mine, merge=lambda _: None, shared=lambda _: None)[0]

    def merge(
        self,
        action: str,
        mine: Callable[[], T],
        merge: Callable[[Sequence[Any]], R],
        undo: Callable[[], None] = _nothing,
        shared: Callable[[T], Any] = lambda value: value,
    ) -> tuple[T, R]:
        """Run `mine` on each rank, merge the results on the first rank, and send the merged result to all.

        Args:
            action: words for the text of errors, such as "Looking for checkpoints".
            mine: computes this rank's result.
            merge: merges the results of all ranks, in rank order. Its result is sent to every rank, so keep it small.
            undo: runs on the first rank if a rank failed.
            shared: selects the part of this rank's result to send to the first rank.

        Returns:
            This rank's result of `mine`, and the result of `merge`.

        Raises:
            CheckpointError: on every rank, with one text, if one rank fails.
            LostRankError: a rank ended, or shows no sign of life.
        """
        try:
            with self._showing_life(action):
                value = mine()
                sent = shared(value)
        except Exception as error:
            text = self._settle(action, _FailedPart(_text_of(error)), merge, undo)
            raise CheckpointError(text.error if isinstance(text, _FailedPart) else str(text)) from error
        merged = self._settle(action, sent, merge, undo)
        if isinstance(merged, _FailedPart):
            raise CheckpointError(merged.error)
        return value, merged

    def _settle(self, action: str, sent: Any, merge: Callable[[Sequence[Any]], R], undo: Callable[[], None]) -> Any:
        """Gather what each rank sends, merge it on the first rank, and return the merged value on every rank.

        The value is a `_FailedPart` if a rank or the merge failed.
        """
        self._meet(action)
        everyone = self._to_first(sent)
        with self._showing_life(action):
            merged = None if everyone is None else _merged(action, everyone, merge, undo)
        self._meet(action)
        return self._from_first(merged)

    def _meet(self, action: str) -> None:
        """Wait until all ranks call this. A missing rank without a sign of life raises a `LostRankError`."""
        if self.channel is not None:
            self.channel.exchange(b"", f"go on with {action[:1].lower()}{action[1:]}")

    def _showing_life(self, action: str) -> AbstractContextManager[None]:
        return nullcontext() if self.channel is None else self.channel.showing_life(action)

    def _to_first(self, value: Any) -> list[Any] | None:
        """Return on the first rank the values of all ranks, in rank order; return None on other ranks."""
        if self.group is None:
            return [value]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with naming_lost_ranks():
            dist.gather_object(value, found, dst=dist.get_global_rank(self.group, 0), group=self.group)
        return found

    def _from_first(self, value: Any) -> Any:
        if self.group is None:
            return value
        held = [value]
        with naming_lost_ranks():
            dist.broadcast_object_list(held, src=dist.get_global_rank(self.group, 0), group=self.group)
        return held[0]


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that run a model: `ranks` of the default process group `world`."""

    world: dist.ProcessGroup
    ranks: tuple[int, ...]


def processes_of(model: nn.Module) -> Processes | None:
    """Return the processes that run `model`; None for one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    assert dist.group.WORLD is not None, "it is initialised"
    control = _control_of(model)
    ranks = range(dist.get_world_size()) if control is None else control.channel.ranks
    return Processes(dist.group.WORLD, tuple(ranks))


def control_of(model: nn.Module, timeout_s: float | None) -> ControlGroup | None:
    """Return a new group of the processes that run `model`; None for one process. For `timeout_s`, see `Ranks.of`."""
    processes, control = processes_of(model), _control_of(model)
    if processes is None:
        return None
    if timeout_s is None:
        timeout_s = TIMEOUT_S if control is None else control.channel.timeout_s
    return ControlGroup(processes.ranks, timeout_s)


def _control_of(model: nn.Module) -> ControlGroup | None:
    return model.engine.control if isinstance(model, ShardedModule) else None


def _merged(action: str, everyone: Sequence[Any], merge: Callable[[Sequence[Any]], R], undo: Callable[[], None]) -> Any:
    failed = {rank: sent.error for rank, sent in enumerate(everyone) if isinstance(sent, _FailedPart)}
    if failed:
        undo()
        return _FailedPart(_describe(action, failed, len(everyone)))
    try:
        return merge(everyone)
    except Exception as error:  # noqa: BLE001  (`merge` raises it on every rank)
        undo()
        return _FailedPart(_describe(action, {0: _text_of(error)}, 1))


def _describe(action: str, failed: dict[int, str], size: int) -> str:
    """Return one error text for all ranks that failed; ranks with the same error are listed together."""
    by_text: dict[str, list[int]] = {}
    for rank, text in failed.items():
        by_text.setdefault(text, []).append(rank)
    told = "; ".join(text if size == 1 else f"ranks {ranks}: {text}" for text, ranks in list(by_text.items())[:_SHOWN])
    more = f"; and {len(by_text) - _SHOWN} more" if len(by_text) > _SHOWN else ""
    return f"{action} failed. {told}{more}"


_SHOWN = 4


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, AutoshardError) else f"{type(error).__name__}: {error}"
