"""Where generated sources lie: one file for each program, in a folder that users can open.

The folder is `autoshard/kernels` of the user's cache (`XDG_CACHE_HOME`, else `~/.cache`). A file is named by a digest
of its text; one whose text is no longer that (somebody edited it) is written anew, so that what runs is always what was
generated. Removing the folder is safe.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType

from autoshard.errors import KernelError

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
        KernelError: the folder cannot be written.
    """
    path = source_folder() / f"program_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    try:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
                file.write(text)
            Path(file.name).replace(path)
    except OSError as error:
        raise KernelError(
            f"generated kernels cannot be written to {str(path.parent)!r}: {error}. Set XDG_CACHE_HOME to a folder "
            "that can be written, or use backend='eager'."
        ) from error
    return path


def load_file(path: Path) -> ModuleType:
    """Import a program's source."""
    spec = importlib.util.spec_from_file_location(f"{_PACKAGE}.{path.stem}", path)
    assert spec is not None, "the path ends in .py"
    assert spec.loader is not None, "a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
