"""Turns tuning of Triton kernels on or off, and sets the folder of tuned block sizes, without importing triton."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from autoshard.errors import KernelError
from autoshard.kernels.candidates import Choice
from autoshard.kernels.generated.files import cache_folder
from autoshard.kernels.private_folder import check_private
from autoshard.kernels.tuning_store import Store

Timer = Callable[..., Sequence[float]]
"""A function like `triton.testing.do_bench`: `timer(function, quantiles=...)` returns times in milliseconds."""
VARIABLE = "AUTOSHARD_TUNE"


@dataclass(slots=True, eq=False)
class Tuning:
    """A setting of `tune_kernels`.

    Args:
        store: the folder of tuned choices, which processes share.
        timer: a timer, or None for Triton's timer. With a timer, interpreted kernels are tuned too.
        known: the choices so far, by launch.
        lock: held while a launch is measured, because autograd runs the backward in other threads.
        measures: whether new launches are measured. False once the folder could not be written.
    """

    store: Store
    timer: Timer | None
    known: dict[tuple[object, ...], Choice] = field(default_factory=dict)
    lock: Any = field(default_factory=Lock)
    measures: bool = True


# The last setting of `tune_kernels`. It is per process and not per thread, because autograd has threads of its own.
_SET: list[Tuning | None] = []


def tune_kernels(is_on: bool = True, *, folder: str | Path | None = None, timer: Timer | None = None) -> None:
    """Turn the tuning of Triton kernels on or off for this process.

    A tuned kernel measures block sizes at its first launch on new sizes, and keeps the fastest in a folder. Tuning is
    off by default, and needs a GPU. The environment variable AUTOSHARD_TUNE does the same for a whole run. Set it to
    "1", or to a folder.

    Args:
        is_on: True turns tuning on. False turns it off, and kernels run with their default block sizes.
        folder: folder of the tuned block sizes, which all ranks must share. None: `autoshard/tuned` in the user's cache
            (`XDG_CACHE_HOME`, or `~/.cache`).
        timer: `timer(function, quantiles=...)`, which returns times in milliseconds. None: `triton.testing.do_bench`.
            With a timer, kernels in Triton's interpreter are tuned too.

    Raises:
        KernelError: the folder belongs to another user, or other users can write to it.
    """
    _SET[:] = [_tuning(Path(folder or _default_folder()), timer) if is_on else None]


def active_tuning() -> Tuning | None:
    """Return the setting of the last call of `tune_kernels`, or without a call the setting of AUTOSHARD_TUNE.

    None means that tuning is off.
    """
    return _SET[0] if _SET else _from_environment(os.environ.get(VARIABLE, ""))


def folder_identity() -> str:
    """Return a text that is equal for processes which share tuned choices, or "none" if this process does not tune.

    Raises:
        KernelError: the folder cannot be written, or is not private to this user.
    """
    tuning = active_tuning()
    if tuning is None:
        return "none"
    folder = tuning.store.folder
    try:
        return f"{folder} ({tuning.store.identity()})"
    except OSError as error:
        raise KernelError(
            f"block sizes cannot be kept in {str(folder)!r}: {error}. Set {VARIABLE} to a writable folder that all "
            "ranks see, or leave it out."
        ) from error


@cache
def _from_environment(value: str) -> Tuning | None:
    if value in ("", "0"):
        return None
    return _tuning(_default_folder() if value == "1" else Path(value), None)


def _tuning(folder: Path, timer: Timer | None) -> Tuning:
    check_private(folder, "measured block sizes")
    return Tuning(Store(folder), timer)


def _default_folder() -> Path:
    return cache_folder() / "tuned"
