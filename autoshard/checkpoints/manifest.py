"""The manifest of a checkpoint: the size of every file, and a checksum (CRC-32) of each of its blocks.

The checksums are computed while the files are written, from the bytes passed to the operating system. They detect every
change of one byte, and miss 1 in 4 billion other changes. The manifest has a checksum of its own.
"""

from __future__ import annotations

import json
import os
import reprlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.errors import CheckpointError

NAME = "checkpoint.json"
VERSION = 2
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Sums:
    """The size of a file, and the checksum of each block of `BLOCK_BYTES`."""

    size_bytes: int
    blocks: tuple[int, ...]


class Summer:
    """Computes a file's size and block checksums from the bytes that `add` receives in order."""

    def __init__(self) -> None:
        self._size_bytes = 0
        self._blocks: list[int] = []
        self._last = 0

    def add(self, data: memoryview) -> None:
        """Take `data` as the next bytes of the file."""
        while len(data):
            part = data[: BLOCK_BYTES - self._size_bytes % BLOCK_BYTES]
            self._last = zlib.crc32(part, self._last)
            self._size_bytes += len(part)
            if self._size_bytes % BLOCK_BYTES == 0:
                self._blocks.append(self._last)
                self._last = 0
            data = data[len(part) :]

    def sums(self) -> Sums:
        """Return the size and the block checksums of all bytes added so far."""
        last = (self._last,) if self._size_bytes % BLOCK_BYTES else ()
        return Sums(self._size_bytes, (*self._blocks, *last))


def sums_of(data: bytes) -> Sums:
    """Return the size and the block checksums of a file that consists of `data`."""
    summer = Summer()
    summer.add(memoryview(data))
    return summer.sums()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The list of a checkpoint's files.

    Args:
        step: the number of steps done at the save.
        ranks: the number of ranks that saved.
        mesh: the mesh as text, for people.
        files: name of a file → its size and checksums.
    """

    step: int
    ranks: int
    mesh: str
    files: Mapping[str, Sums]

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder, and return when its bytes are on the disk."""
        write_through(folder / NAME, _text(self._as_json()).encode())

    def _as_json(self) -> dict[str, Any]:
        files = {name: {"bytes": sums.size_bytes, "crc32": sums.blocks} for name, sums in sorted(self.files.items())}
        body = {"version": VERSION, "step": self.step, "ranks": self.ranks, "mesh": self.mesh}
        body |= {"block_bytes": BLOCK_BYTES, "files": files}
        return {**body, "crc32": zlib.crc32(_text(body).encode())}

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a checkpoint's manifest.

        Raises `CheckpointError` if the manifest is missing, damaged, or of an unknown version.
        """
        path = folder / NAME
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}. {refused(folder)}") from error
        found = _parsed(data)
        if found is None:
            raise CheckpointError(f"{path} is damaged: its checksum does not match. {refused(folder)}")
        version = found.get("version")
        if version != VERSION:
            raise CheckpointError(
                f"{path} has version={reprlib.repr(version)}, and this release reads {VERSION}. Load it with the "
                "release that wrote it."
            )
        try:
            sums = {name: _sums(name, item["bytes"], item["crc32"]) for name, item in found["files"].items()}
            return cls(_count(found["step"]), _count(found["ranks"]), str(found["mesh"]), sums)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{path} was not written by Checkpoints. {refused(folder)}") from error


def _sums(name: str, size: object, blocks: Sequence[object]) -> Sums:
    if Path(name).name != name or name == "..":
        raise ValueError(f"{name!r} is not the name of a file in the folder")
    sums = Sums(_count(size), tuple(map(_count, blocks)))
    if len(sums.blocks) != -(-sums.size_bytes // BLOCK_BYTES):
        raise ValueError(f"{len(sums.blocks)} checksums for {sums.size_bytes} bytes")
    return sums


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("not a whole number")
    return value


def refused(folder: Path) -> str:
    """Return the last sentence of each error about a damaged checkpoint: how the user can go on."""
    return f"Restore the file, or delete {folder} to go on from the previous checkpoint."


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))


def _parsed(data: bytes) -> dict[str, Any] | None:
    """Parse the text of `Manifest.write`; None if any byte of it changed."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or _text(found).encode() != data:
        return None
    body = {key: value for key, value in found.items() if key != "crc32"}
    return found if found.get("crc32") == zlib.crc32(_text(body).encode()) else None


def damaged_blocks(path: Path, sums: Sums, blocks: Iterable[int]) -> Iterable[int]:
    """Yield each number in `blocks` whose block of the file has another checksum than in `sums`."""
    with path.open("rb") as file:
        for block in blocks:
            file.seek(block * BLOCK_BYTES)
            if zlib.crc32(file.read(BLOCK_BYTES)) != sums.blocks[block]:
                yield block


def write_through(path: Path, data: bytes) -> None:
    """Write a file, and return when its bytes are on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
