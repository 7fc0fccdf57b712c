"""Edits of checkpoints by an attacker: their checksums fit, and their contents are harmful."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoshard.checkpoints.manifest import Manifest, sums_of


class RunsCode:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def replace(folder: Path, name: str, data: bytes) -> None:
    """Write a file of a checkpoint, and put its checksums into the manifest."""
    (folder / name).write_bytes(data)
    found = Manifest.read(folder)
    Manifest(found.step, found.ranks, found.mesh, {**found.files, name: sums_of(data)}).write(folder)


def edit_table(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the table of contents, and its checksums in the manifest."""
    table = json.loads((folder / "metadata.json").read_text())
    edit(table)
    replace(folder, "metadata.json", json.dumps(table).encode())


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, and its own checksum."""
    body = json.loads((folder / "checkpoint.json").read_text())
    del body["crc32"]
    edit(body)
    body["crc32"] = zlib.crc32(json.dumps(body, separators=(",", ":")).encode())
    (folder / "checkpoint.json").write_text(json.dumps(body, separators=(",", ":")))
