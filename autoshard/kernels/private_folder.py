"""Folders that only their user can write: what a process runs, or is tuned by, lies in no other."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from autoshard.errors import KernelError

_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path, purpose: str) -> None:
    """Make a folder that only this user can open, and its parents; one that is there must be private already.

    Args:
        folder: the folder.
        purpose: what lies there, for the error: "generated kernels".

    Raises:
        OSError: it cannot be made.
        KernelError: it is another user's, or others can write to it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder, purpose)


def check_private(folder: Path, purpose: str) -> None:
    """Raise `KernelError` where a folder is another user's, or others can write to it; none is as good as private."""
    try:
        found = folder.stat()
    except OSError:
        return
    if found.st_uid != os.geteuid():
        reason = f"it belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
    elif found.st_mode & _OF_OTHERS:
        reason = f"other users can write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return
    raise KernelError(
        f"{purpose} are not kept in {str(folder)!r}: {reason}, so what lies there may be anybody's. Remove it, "
        "make it yours alone (chmod 700), or name another folder: XDG_CACHE_HOME, of block sizes AUTOSHARD_TUNE."
    )
