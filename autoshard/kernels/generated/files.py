"""Where generated sources lie: one file for each program, in a folder that users can open.

The folder is `autoshard/kernels` of the user's cache (`XDG_CACHE_HOME`, else `~/.cache`). A file is named by a digest
of its text; one whose text is no longer that (somebody edited it) is written anew. What runs is the generated text
itself: no file is executed, and no bytecode beside it is read. The folder is the user's alone. Removing it is safe.
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
    """Our folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "autoshard"


def source_folder() -> Path:
    """The folder of generated sources."""
    return cache_folder() / "kernels"


def write_file(text: str) -> Path:
    """Write a program's source and give its path; several processes may do so at once.

    Raises:
        KernelError: the folder cannot be written, or not by this user alone.
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
            f"generated kernels cannot be written to {str(path.parent)!r}: {error}. Set XDG_CACHE_HOME to a folder "
            "that can be written, or use backend='auto'."
        ) from error
    return path


def load_text(text: str, path: Path) -> ModuleType:
    """A program's source as a module; `path` is where people, debuggers and Triton find its lines."""
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    module = ModuleType(f"{_PACKAGE}.{path.stem}")
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
    return module
