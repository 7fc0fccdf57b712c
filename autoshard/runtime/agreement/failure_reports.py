"""Ranks report their failures in the store of the run, so that an error names the ranks that reported nothing.

If a rank stops, all ranks that wait for it fail soon after each other. Each of them reports its error, and waits a
moment for the reports of the other ranks. The ranks without a report are where to look first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch.distributed as dist

_GRACE_S = 3.0
"""Seconds that a rank waits for the reports of other ranks after a time-out."""

_PAUSE_S = 0.05
_SHOWN, _LONGEST = 4, 300
"""The largest number of sentences in an error, and the largest number of characters of a report."""

_WAITED = "waited"
"""Report of a rank that failed because it waited for another rank."""


def report_failure(error: BaseException) -> None:
    """Tell the other ranks that this rank failed by itself. Does nothing without a process group, or a second time."""
    if dist.is_available() and dist.is_initialized():
        _tell(f"{type(error).__name__}: {error}"[:_LONGEST])


def reports_in_words(*, waits: bool) -> str:
    """Report that this rank failed because it waited, and return sentences on the other ranks.

    Args:
        waits: whether to wait a few seconds for reports of the other ranks, and to name ranks without a report. If a
            process ended, a launcher soon ends all others, so there is no time to wait.

    Returns:
        Sentences; "" if there is nothing to say, or if the store is gone with the process that held it.
    """
    _tell(_WAITED)
    store, ranks, told = _store(), range(dist.get_world_size()), dict[int, str]()
    end = time.monotonic() + (_GRACE_S if waits else 0.0)
    with suppress(RuntimeError):  # the store is gone
        while True:
            new = [rank for rank in ranks if rank not in told and store.check([_key(rank)])]
            told |= {rank: store.get(_key(rank)).decode() for rank in new}
            if len(told) == len(ranks) or time.monotonic() >= end:
                break
            time.sleep(_PAUSE_S)
    silent = [rank for rank in ranks if rank not in told]
    return in_words(told, silent if waits and told else [])


def in_words(told: Mapping[int, str], silent: Sequence[int]) -> str:
    """Return sentences on the reports of ranks, by rank, and on the ranks without a report."""
    words = [f"Rank {rank} failed with {text.rstrip('.')}." for rank, text in told.items() if text != _WAITED]
    if silent:
        words = [*words[: _SHOWN - 1], f"Ranks {list(silent)} gave no sign."]
    return " ".join(words[:_SHOWN])


def _tell(text: str) -> None:
    with suppress(RuntimeError):  # as above
        _store().compare_set(_key(dist.get_rank()), "", text)


def _key(rank: int) -> str:
    return f"autoshard/failed/{rank}"


def _store() -> dist.Store:
    world = dist.group.WORLD
    assert world is not None, "there is a process group"
    return world.get_group_store()
