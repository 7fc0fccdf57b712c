"""Whether this process measures block sizes, and where it keeps them. Imports no triton: the public face has it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autoshard.errors import KernelError
from autoshard.kernels.generated.files import cache_folder
from autoshard.kernels.private_folder import check_private
from autoshard.kernels.tuning_store import Store

Timer = Callable[..., Sequence[float]]
"""As `triton.testing.do_bench`: called with a function and `quantiles`, gives its times in milliseconds."""
VARIABLE = "AUTOSHARD_TUNE"


@dataclass(frozen=True, slots=True, eq=False)
class Tuning:
    """That block sizes are measured; see `tune_kernels`."""

    store: Store
    timer: Timer | None


# What `tune_kernels` asked for last. Of the process, not of a thread: autograd has threads of its own.
_ASKED: list[Tuning | None] = []


def tune_kernels(is_on: bool = True, *, folder: str | Path | None = None, timer: Timer | None = None) -> None:
    """Measure block sizes of Triton kernels from now on, and keep them; or stop.

    The variable AUTOSHARD_TUNE does the same for a whole run: "1", or a folder.

    Args:
        is_on: False: kernels run with the heuristic's block sizes.
        folder: where choices lie; by default `autoshard/tuned` of the user's cache (`XDG_CACHE_HOME`, else
            `~/.cache`). Ranks on several machines need one that all see.
        timer: in place of `triton.testing.do_bench`: called with a function and `quantiles=`, gives milliseconds. Given
            one, kernels in Triton's interpreter are tuned too.

    Raises:
        KernelError: the folder is another user's, or others can write to it.
    """
    _ASKED[:] = [_tuning(Path(folder or _default_folder()), timer) if is_on else None]


def active_tuning() -> Tuning | None:
    """What `tune_kernels` asked for last, else the variable."""
    return _ASKED[0] if _ASKED else _from_environment(os.environ.get(VARIABLE, ""))


def folder_identity() -> str:
    """Which choices this process shares with others; "none" where it does not measure.

    Raises:
        KernelError: the folder cannot be written.
    """
    tuning = active_tuning()
    if tuning is None:
        return "none"
    folder = tuning.store.folder
    try:
        return f"{folder} ({tuning.store.identity()})"
    except OSError as error:
        raise KernelError(
            f"block sizes cannot be kept in {str(folder)!r}: {error}. Name a folder that can be written, and that all "
            f"ranks see, in {VARIABLE}, or leave it out."
        ) from error


@cache
def _from_environment(asked: str) -> Tuning | None:
    if asked in ("", "0"):
        return None
    return _tuning(_default_folder() if asked == "1" else Path(asked), None)


def _tuning(folder: Path, timer: Timer | None) -> Tuning:
    check_private(folder, "measured block sizes")
    return Tuning(Store(folder), timer)


def _default_folder() -> Path:
    return cache_folder() / "tuned"
