"""The folder of all checkpoints. One rename makes a checkpoint complete; one rename deletes it.

`step-1000` is a complete checkpoint. It got this name by one rename, after all of its files were on the disk. Other
names begin with a dot:

* `.step-1000.writing-3f0c...`: a checkpoint that is being written, or whose writer crashed;
* `.step-1000.replaced`: a complete checkpoint of an earlier run that reached the same step; it counts if there is no
  `step-1000`;
* `.step-1000.deleted-3f0c...`: a checkpoint that is being deleted.

The next save removes the remains of a crash.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoshard.errors import CheckpointError
from autoshard.ir.files import sync

_LOGGER = logging.getLogger(__name__)

_COMPLETE = re.compile(r"step-([0-9]+)")
_REPLACED = re.compile(r"\.step-([0-9]+)\.replaced")
_LEFT_OVER = re.compile(r"\.step-[0-9]+\.(writing|deleted)-[0-9a-f]+")


def complete(folder: Path) -> dict[int, Path]:
    """Return the paths of the complete checkpoints by step, in ascending order."""
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    replaced = {int(found[1]): folder / name for name in names if (found := _REPLACED.fullmatch(name))}
    named = {int(found[1]): folder / name for name in names if (found := _COMPLETE.fullmatch(name))}
    return dict(sorted((replaced | named).items()))


def latest(folder: Path) -> Path | None:
    """Return the path of the complete checkpoint with the most steps; None if there is none."""
    return next(reversed(complete(folder).values()), None)


def begin(folder: Path, step: int) -> Path:
    """Return the path under which to write the checkpoint of `step`, and remove the remains of crashes.

    Raises `CheckpointError` if the folder has a complete checkpoint of more steps, which would stay the latest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    later = max(complete(folder), default=step)
    if later > step:
        raise CheckpointError(
            f"{folder} holds a checkpoint of step {later}, which is after at={step} and would stay the latest. Load it "
            "and go on from there, delete it, or save to another folder."
        )
    return folder / f".step-{step}.writing-{secrets.token_hex(4)}"


def sweep(folder: Path) -> None:
    """Remove the remains of crashes. Log a warning for a failed removal.

    A replaced checkpoint is renamed back to `step-N`, or deleted if there is a `step-N`.
    """
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if _LEFT_OVER.fullmatch(path.name):
            _or_warn(path, _remove, path)
        elif found := _REPLACED.fullmatch(path.name):
            _settle(folder, path, folder / f"step-{found[1]}")


def _settle(folder: Path, replaced: Path, name: Path) -> None:
    if os.path.lexists(name):
        _or_warn(replaced, _delete, replaced, name.name)
    else:
        replaced.rename(name)
        sync(folder)


def commit(written: Path, step: int) -> Path:
    """Make a checkpoint complete: rename its folder `written` to `step-N`, and return the new path.

    All files of the checkpoint must be on the disk already. An older checkpoint of the same step is deleted.
    """
    folder = written.parent
    name, replaced = folder / f"step-{step}", folder / f".step-{step}.replaced"
    sync(written)
    if os.path.lexists(name):
        name.rename(replaced)
        sync(folder)
    written.rename(name)
    sync(folder)
    if os.path.lexists(replaced):
        _or_warn(replaced, _delete, replaced, name.name)
    return name


def keep_latest(folder: Path, keep: int | None) -> None:
    """Delete all complete checkpoints but the latest `keep`; None keeps all. Log a warning for a failed deletion."""
    for path in [] if keep is None else list(complete(folder).values())[:-keep]:
        _or_warn(path, _delete, path, path.name)


def _or_warn(path: Path, delete: Callable[..., None], *arguments: Any) -> None:
    try:
        delete(*arguments)
    except OSError as error:
        _LOGGER.warning("the old checkpoint %s cannot be deleted: %s", path, error)


def _remove(path: Path) -> None:
    """Remove a folder with its files; a symbolic link is removed without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _delete(path: Path, name: str) -> None:
    """Delete the checkpoint at `path`.

    The folder is first renamed to `.NAME.deleted-...`, where `NAME` is `name`, so that no reader finds it.
    """
    gone = path.with_name(f".{name}.deleted-{secrets.token_hex(4)}")
    path.rename(gone)
    sync(path.parent)
    _remove(gone)


def discard(written: Path) -> None:
    """Remove the folder of a checkpoint that cannot become complete; errors are ignored."""
    shutil.rmtree(written, ignore_errors=True)
