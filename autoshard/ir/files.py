"""Reads and writes text files, such as plans, with errors that name the path. `sync` waits for the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from autoshard.errors import NotAvailableError, PlanMismatchError


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8. Raises `NotAvailableError` if the file cannot be written."""
    checked = _checked(path)
    try:
        checked.write_text(text, encoding="utf-8")
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_out = "Free some space, or name another disk." if is_full else "Name a file in a folder that exists."
        raise NotAvailableError(f"{os.fspath(path)!r} cannot be written: {error.strerror}. {way_out}") from error


def check_can_write(path: str | Path) -> None:
    """Raise `NotAvailableError` if `path` is a folder, or if its folder does not exist.

    Call this function before long work whose result is written to `path`.
    """
    checked = _checked(path)
    if checked.is_dir() or not checked.parent.is_dir():
        reason = os.strerror(errno.EISDIR if checked.is_dir() else errno.ENOENT)
        raise NotAvailableError(
            f"{os.fspath(path)!r} cannot be written: {reason}. Name a file in a folder that exists."
        )


def read_text(path: str | Path) -> str:
    """Return the text of a plan's file in UTF-8. Raises `PlanMismatchError` if it cannot be read, or is no text."""
    checked = _checked(path)
    try:
        return checked.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanMismatchError(
            f"{os.fspath(path)!r} cannot be read: {error.strerror}. Name a file that Plan.save wrote."
        ) from error
    except UnicodeDecodeError as error:
        raise PlanMismatchError(f"{os.fspath(path)!r} is not a plan that autoshard wrote: it is no text.") from error


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checked(path: str | Path) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise NotAvailableError(f"path={path!r} is a {type(path).__name__}; pass the path of a file.")
    return Path(path)
