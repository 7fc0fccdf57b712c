"""Safetensors files as one set of named tensors that can be read by regions.

The files are one file, the files of an index (`model.safetensors.index.json`), or all files of a folder. The library
maps a file into memory, and reads only the pages that a region touches. These count as memory of this process until the
file is closed, so files are reopened from time to time.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from autoshard.errors import WeightsError
from autoshard.ir.read_json import parse
from autoshard.runtime.weights.unread import Region, Unread, shape_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MOST_MAPPED_BYTES = 32 * 2**20
"""A file is reopened after this many bytes have been read from it, including the bytes between rows."""


@dataclass(frozen=True, slots=True)
class _IndexedFiles:
    """The files to read.

    Args:
        paths: the files.
        index: the file that lists them, or None.
        promised: name of a tensor → its file, according to the index.
    """

    paths: tuple[Path, ...]
    index: Path | None
    promised: Mapping[str, Path]


class WeightFiles:
    """The tensors of a set of safetensors files: of a folder, a file, or an index.

    Attributes:
        tensors: name → tensor; values are read when needed.
        homes: name of a tensor → its file.

    Raises:
        WeightsError: the message names each missing or damaged file, and each tensor that is not where the index says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._reader = _RegionReader()
        self.tensors: dict[str, Unread] = {}
        self.homes: dict[str, Path] = {}
        problems = [*self._find_all(_find(self.path))]
        if problems:
            raise WeightsError(f"{self.path} cannot be read: {'; '.join(problems)}.")

    def describe(self) -> str:
        """Return a text with the names, shapes and dtypes of all tensors."""
        return ", ".join(f"{name}: {describe(tensor)}" for name, tensor in sorted(self.tensors.items()))

    def _find_all(self, found: _IndexedFiles) -> Iterator[str]:
        """Add the tensors of all files to `tensors` and `homes`; yield a text for each problem."""
        for path in found.paths:
            try:
                tensors = {name: _outline(file, name) for file in [_opened(path)] for name in file.keys()}  # noqa: SIM118
            except WeightsError as error:
                yield str(error)
                continue
            for name, (shape, dtype) in tensors.items():
                if name in self.tensors:
                    yield f"tensor {name!r} is in {self.homes[name].name} and in {path.name}"
                self.homes[name] = path
                self.tensors[name] = Unread(shape, dtype, partial(self._reader.read, path, name))
        for name, path in found.promised.items():
            if path.exists() and self.homes.get(name, path) != path:
                yield f"{found.index} says that tensor {name!r} is in {path.name}, but it is in {self.homes[name].name}"
            elif path in self.homes.values() and name not in self.homes:
                yield f"{found.index} says that tensor {name!r} is in {path.name}, which has no tensor of that name"


class _RegionReader:
    """Reads regions of tensors in files. The file that was read last stays open."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None
        self._mapped_bytes = 0

    def read(self, path: Path, name: str, region: Region) -> torch.Tensor:
        if path != self._path or self._mapped_bytes > _MOST_MAPPED_BYTES:
            self._file = None  # closed before it is opened again
            self._file, self._path, self._mapped_bytes = _opened(path), path, 0
        values = self._file.get_slice(name)[region] if region else self._file.get_tensor(name)
        self._mapped_bytes += _touched_bytes(values)
        if tuple(values.shape) != shape_of(region):
            raise WeightsError(f"{path} gave shape={tuple(values.shape)} for {region} of tensor {name!r}")
        return values


def _touched_bytes(values: torch.Tensor) -> int:
    """Return the bytes in the file from the first to the last of `values`, which are a view of it."""
    steps = zip(values.shape, values.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * values.itemsize if values.numel() else 0


def _opened(path: Path) -> Any:
    """Return an open safetensors file. The library checks its header and its length.

    Raises:
        WeightsError: the file is missing or damaged.
    """
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise WeightsError(f"there is no file {path}") from error
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path} is damaged, truncated, or not a safetensors file ({error}): copy or download it a second time"
        ) from error


def _outline(file: Any, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    part = file.get_slice(name)
    shape = tuple(part.get_shape())
    return shape, (part[0:0] if shape else file.get_tensor(name)).dtype


def _find(path: Path) -> _IndexedFiles:
    """Return the files at a path: a file, the files of an index, or the files of a folder."""
    if path.is_file():
        return _of_index(path) if path.name.endswith(".json") else _IndexedFiles((path,), None, {})
    if not path.is_dir():
        raise WeightsError(
            f"There is no file or folder {path}. Weights are read from local files; "
            "huggingface_hub.snapshot_download fetches a folder."
        )
    if (path / SINGLE).is_file():
        return _IndexedFiles((path / SINGLE,), None, {})
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return _of_index(indices[0])
    if indices:
        raise WeightsError(f"{path} has several indices: {', '.join(item.name for item in indices)}. Name one of them.")
    paths = tuple(sorted(path.glob("*.safetensors")))
    if not paths:
        there = sorted(item.name for item in path.iterdir())
        found = f"only {', '.join(there[:8])}" if there else "it is empty"
        raise WeightsError(
            f"{path} has no safetensors files, {found}. Write the "
            "weights with safetensors.torch.save_model, or model.save_pretrained."
        )
    return _IndexedFiles(paths, None, {})


def _of_index(path: Path) -> _IndexedFiles:
    try:
        names = parse(path.read_text(encoding="utf-8"))["weight_map"]
        outside = [file for file in names.values() if not _stays_inside(file)]
        promised = {} if outside else {name: path.parent / file for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is damaged, or not an index of safetensors files: {error!r}.") from error
    if outside:
        raise WeightsError(
            f"{path} names {reprlib.repr(outside[0])}, which is outside of the index's folder. An index may only name "
            "files in its folder: copy the file there, and change the name in the index."
        )
    return _IndexedFiles(tuple(sorted(set(promised.values()))), path, promised)


def _stays_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return not (path.is_absolute() or ".." in path.parts or "\0" in file or "\\" in file)


def describe(tensor: torch.Tensor | Unread) -> str:
    """Return a tensor's dtype and shape as text, such as `float32[4, 2]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
