"""Writes the generated source of each program to a file that users can open, and loads the source.

The folder is `autoshard/kernels` in the user's cache (`XDG_CACHE_HOME`, or `~/.cache`). Other users cannot write to it,
and it can be removed safely. Python executes the generated text in memory, and never reads the file.
"""

from __future__ import annotations

import hashlib
import linecache
import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType

from autoshard.errors import KernelError
from autoshard.kernels.private_folder import make_private

_PACKAGE = "autoshard_generated"


def cache_folder() -> Path:
    """Return autoshard's folder in the user's cache, whether or not it exists yet."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "autoshard"


def source_folder() -> Path:
    """Return the folder of generated sources, whether or not it exists yet."""
    return cache_folder() / "kernels"


def write_file(text: str) -> Path:
    """Write a program's generated source to its file and return the path. Several processes may do so at once.

    Raises:
        KernelError: the folder cannot be written, or cannot be made private to this user.
    """
    path = source_folder() / f"program_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    try:
        make_private(cache_folder(), "generated kernels")
        make_private(path.parent, "generated kernels")
        if not path.exists() or path.read_bytes() != text.encode():
            with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
                file.write(text)
            Path(file.name).replace(path)
    except OSError as error:
        raise KernelError(
            f"generated kernels cannot be written to {str(path.parent)!r}: {error}. Set XDG_CACHE_HOME to a writable "
            "folder, or use backend='auto'."
        ) from error
    return path


def load_text(text: str, path: Path) -> ModuleType:
    """Execute a program's generated source, and return the resulting module.

    Tracebacks and Triton name `path` as the source's file, but the file is not read.
    """
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    module = ModuleType(f"{_PACKAGE}.{path.stem}")
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
    return module
