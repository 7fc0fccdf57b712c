"""`ControlChannel`: ranks send each other messages through the key-value store of their run, within a time limit.

In each turn every rank sends one message, and all ranks receive all messages or raise the same error. A rank that works
for long writes a changing value to the store: a sign of life. The other ranks wait for it beyond the time limit.
The verdict on a turn is one key that is written once: "all", or a text that names the missing ranks.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from autoshard.errors import LostRankError
from autoshard.runtime.agreement.lost_ranks import naming_a_lost_store
from autoshard.runtime.agreement.meeting import refuse_a_kept_store

TIMEOUT_S = 60.0
"""The default seconds that ranks wait for a rank that neither sends its message nor shows a sign of life."""

_ALL_CAME = "all"
_SLICE_S = 0.25
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
_LARGEST_PART = 4 * 2**20
"""The most bytes of a message under one key of the store. A longer message is split into parts, one per key.

The store of `torchrun` fails for values above 8 MiB.
"""

_COUNT = struct.Struct("<I")
"""The format of the number of parts of a message, which precedes the bytes of the message's first part."""


class ControlChannel:
    """Exchanges messages among `ranks`, in turns. This process has one of the ranks.

    Args:
        ranks: ranks of the default process group, in the order of the messages.
        timeout_s: seconds without a message or a sign of life after which a rank is lost.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float = TIMEOUT_S) -> None:
        self.ranks = tuple(ranks)
        self.rank = dist.get_rank()
        self.timeout_s = timeout_s
        self._slice_s = min(_SLICE_S, timeout_s / 8)
        self._store = _store_of(self.ranks, self.rank)
        self._turn = 0
        self._before = "nothing"
        self._parts: dict[int, int] = {}

    def say(self, value: bytes) -> None:
        """Send this rank's message of the next turn. Unlike `exchange`, this does not wait for the other ranks."""
        with naming_a_lost_store(self.rank):
            self._say(value)

    def exchange(self, value: bytes, action: str, timeout_s: float | None = None) -> list[bytes]:
        """Send `value` in the next turn, and return the messages of all ranks, in the order of `ranks`.

        Args:
            value: this rank's message.
            action: the next action of the ranks, for error messages.
            timeout_s: time limit of this turn in seconds; default: the channel's.

        Raises:
            LostRankError: on every rank, also on a late rank, if a rank does not send its message in time.
        """
        with naming_a_lost_store(self.rank):
            turn = self._say(value)
            verdict = self._wait_for_verdict(turn, action, self.timeout_s if timeout_s is None else timeout_s)
            if verdict != _ALL_CAME:
                raise LostRankError(verdict)
            firsts = self._store.multi_get([f"{turn}/{rank}" for rank in self.ranks])
            everyone = [self._whole(turn, rank, first) for rank, first in zip(self.ranks, firsts, strict=True)]
            self._forget(turn - 1)
        self._before = action
        return everyone

    @contextmanager
    def showing_life(self, action: str) -> Iterator[None]:
        """Within the context, a thread writes signs of life to the store, so that other ranks wait for this rank."""
        ended = threading.Event()
        thread = threading.Thread(target=self._show_life, args=(action, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _say(self, value: bytes) -> int:
        turn, self._turn = self._turn, self._turn + 1
        parts = [value[start : start + _LARGEST_PART] for start in range(0, len(value), _LARGEST_PART)] or [b""]
        if len(parts) > 1:
            self._parts[turn] = len(parts)
        for number, part in enumerate(parts[1:], start=1):
            self._store.set(f"{turn}/{self.rank}/{number}", part)  # type: ignore[arg-type]  (torch takes bytes too)
        self._store.set(f"{turn}/{self.rank}", _COUNT.pack(len(parts)) + parts[0])  # type: ignore[arg-type]
        if self._store.add(f"{turn}/count", 1) == len(self.ranks):
            self._store.compare_set(f"{turn}/verdict", "", _ALL_CAME)
        return turn

    def _whole(self, turn: int, rank: int, first: bytes) -> bytes:
        """Return a rank's message.

        `first` has the number of the message's parts, and then its first part. The other parts are in the store.
        """
        (count,) = _COUNT.unpack_from(first)
        others = (self._store.get(f"{turn}/{rank}/{number}") for number in range(1, count))
        return b"".join((first[_COUNT.size :], *others))

    def _wait_for_verdict(self, turn: int, action: str, timeout_s: float) -> str:
        key, start = f"{turn}/verdict", time.monotonic()
        lives: dict[int, tuple[bytes, float]] = dict.fromkeys(self.ranks, (b"", start))
        while not self._has_come(key):
            missing = [rank for rank in self.ranks if not self._store.check([f"{turn}/{rank}"])]
            now = time.monotonic()
            for rank in missing:
                sign = self._sign_of(rank)
                lives[rank] = lives[rank] if sign == lives[rank][0] else (sign, now)
            lost = [rank for rank in missing if now - lives[rank][1] > timeout_s]
            if lost:
                self._store.compare_set(key, "", self._describe(lost, missing, action, now - start))
        return self._store.get(key).decode()

    def _has_come(self, key: str) -> bool:
        """Wait up to `_slice_s` seconds for a key, and return whether the store has it.

        The store's own wait would log a line for each time-out.
        """
        end, pause_s = time.monotonic() + self._slice_s, _SHORTEST_PAUSE_S
        while not self._store.check([key]):
            if time.monotonic() >= end:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def _describe(self, lost: list[int], missing: list[int], action: str, waited_s: float) -> str:
        here = [rank for rank in self.ranks if rank not in missing]
        return (
            f"Ranks {lost} did not come within {waited_s:.0f} s, and showed no sign of life, while ranks {here} waited "
            f"to {action}. The last action of all ranks together: {self._before}. A rank that ended has an error of "
            "its own, so look for it first. If a rank works alone for longer between two calls, pass more seconds as "
            "Options(timeout_s=), or Checkpoints(..., timeout_s=)."
        )

    def _sign_of(self, rank: int) -> bytes:
        key = f"life/{rank}"
        return self._store.get(key) if self._store.check([key]) else b""

    def _show_life(self, action: str, ended: threading.Event) -> None:
        count = 0
        try:
            while not ended.is_set():
                count += 1
                self._store.set(f"life/{self.rank}", f"{count} {time.time()} {action}")
                ended.wait(min(1.0, self.timeout_s / 4))
        except RuntimeError:
            return  # the store is gone; the rank's next message raises the error

    def _forget(self, turn: int) -> None:
        """Delete this rank's message of `turn` (if any) from the store; the first rank deletes the verdict too.

        All ranks must have read the message and the verdict before.
        """
        if turn < 0:
            return
        self._store.delete_key(f"{turn}/{self.rank}")
        for number in range(1, self._parts.pop(turn, 1)):
            self._store.delete_key(f"{turn}/{self.rank}/{number}")
        if self.rank == self.ranks[0]:
            self._store.delete_key(f"{turn}/count")
            self._store.delete_key(f"{turn}/verdict")


def _store_of(ranks: tuple[int, ...], rank: int) -> dist.Store:
    """Return the run's store, with a prefix that no other channel of `ranks` has.

    The prefix counts the channels of `ranks`. All ranks make their channels in the same order, so they get equal
    prefixes.
    """
    world = dist.group.WORLD
    assert world is not None, "there is a process group"
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]
    store = world.get_group_store()
    refuse_a_kept_store(store)
    number = store.add(f"autoshard/{name}/made/{rank}", 1)
    return dist.PrefixStore(f"autoshard/{name}/{number}", store)
