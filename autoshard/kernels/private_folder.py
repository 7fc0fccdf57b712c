"""Makes and checks folders that only this user can write, for generated code and for measured block sizes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from autoshard.errors import KernelError

_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path, purpose: str) -> None:
    """Make a folder that only this user can open, together with its missing parents.

    An existing folder must belong to this user, and other users must not be able to write to it. `purpose` names the
    folder's contents in messages, such as "generated kernels".

    Raises:
        OSError: the folder or a parent cannot be made.
        KernelError: an existing folder belongs to another user, or other users can write to it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder, purpose)


def check_private(folder: Path, purpose: str) -> None:
    """Raise `KernelError` if a folder belongs to another user, or if other users can write to it.

    A missing folder passes the check. `purpose` names the folder's contents in the message.
    """
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
        f"{purpose} are not kept in {str(folder)!r}: {reason}, so its files may be anybody's. Remove it, make it yours "
        "alone (chmod 700), or set another folder by XDG_CACHE_HOME (for block sizes, by AUTOSHARD_TUNE)."
    )
