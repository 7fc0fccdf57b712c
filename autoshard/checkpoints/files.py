"""The files of a checkpoint: written and read by torch.distributed.checkpoint, checked by us."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    SavePlan,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.storage import WriteResult

from autoshard.checkpoints import manifest as manifests
from autoshard.checkpoints.manifest import BLOCK_BYTES, Manifest, Summer, Sums, damaged_blocks, refused
from autoshard.checkpoints.snapshot import Item
from autoshard.errors import CheckpointError

_METADATA = ".metadata"
PLAN = "plan.json"
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank has written: the plan by which, what the library says of it, and the checksums of its files."""

    plan: SavePlan
    results: list[WriteResult]
    files: Mapping[str, Sums]


class _SummedFile(io.RawIOBase):
    """A file that is written, with its checksums; `refused` is told when the system takes no more."""

    def __init__(self, path: Path, file: io.IOBase, summer: Summer, refused: Callable[[OSError], None]) -> None:
        self._path, self._file, self._summer, self._refused = path, file, summer, refused

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            with _naming(self._path):
                self._file.write(view)  # type: ignore[attr-defined]
        except OSError as error:
            self._refused(error)
            raise
        self._summer.add(view)
        return len(view)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        if not self._file.closed:
            with _naming(self._path):
                self._file.flush()

    def fileno(self) -> int:
        self.flush()  # who asks syncs the file, and the library does not flush its metadata before
        return self._file.fileno()


class _SummedFiles(FileSystem):
    """Files that are written, with their checksums by name.

    Where the system refuses to take more, `error` says so: torch.save then ends in an error of its own.
    """

    def __init__(self) -> None:
        self.summers: dict[str, Summer] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        with _naming(Path(path)), super().create_stream(path, mode) as file:
            self.summers[Path(path).name] = summer = Summer()
            yield _SummedFile(Path(path), file, summer, self._refuse)

    def _refuse(self, error: OSError) -> None:
        self.error = self.error or error

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.summers[Path(new_path).name] = self.summers.pop(Path(path).name)

    def sums(self) -> dict[str, Sums]:
        return {name: summer.sums() for name, summer in self.summers.items()}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Within, errors of the system name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


class _SavePlanner(DefaultSavePlanner):
    """Writes items by their names, and forgets the value of each as it is written."""

    def __init__(self, items: Mapping[str, Item]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._values = {name: item.value for name, item in items.items()}
        self.writing = ""

    def lookup_object(self, index: MetadataIndex) -> Any:
        self.writing = index.fqn
        return self._values.pop(index.fqn)


class Writer:
    """Writes a checkpoint into a folder that is not complete yet.

    Args:
        folder: of this checkpoint.
        rank: of this process among those that write.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self._rank = rank
        self._files = _SummedFiles()
        self._writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
        self._writer.fs = self._files

    def write(self, items: dict[str, Item]) -> Written:
        """Write what is this rank's, to the disk; `items` is emptied, so that each copy is freed when it is written.

        Raises:
            CheckpointError: a file cannot be written; it names the file and the tensor.
        """
        planner = _SavePlanner(items)
        planner.set_up_planner({name: _described(item) for name, item in items.items()})
        items.clear()
        try:
            self._writer.set_up_storage_writer(self._rank == 0)
            plan = self._writer.prepare_local_plan(planner.create_local_plan())
            plan = self._writer.prepare_global_plan([SavePlan([])] * self._rank + [plan])[-1]
            results = self._writer.write_data(plan, planner).wait()
        except (OSError, RuntimeError) as error:
            cause = self._files.error or error
            if not isinstance(cause, OSError):
                raise
            raise _cannot_be_written(cause, self.folder, planner.writing) from error
        return Written(dataclasses.replace(plan, storage_data=None), results, self._files.sums())

    def finish(self, everyone: Sequence[Written], step: int, mesh: str, plan: str | None) -> None:
        """On the first rank: write what makes one checkpoint of what all have written.

        Args:
            everyone: what each rank has written.
            step: steps done.
            mesh: for people.
            plan: the text of the plan, if there is one.

        Raises:
            CheckpointError: a file cannot be written, or what a rank has written is not there.
        """
        files = {name: sums for written in everyone for name, sums in written.files.items()}
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        _, metadata = planner.create_global_plan([written.plan for written in everyone])
        try:
            self._writer.finish(metadata, [written.results for written in everyone])
            files |= self._files.sums()
            if plan is not None:
                manifests.write_through(self.folder / PLAN, plan.encode())
                files[PLAN] = manifests.sums_of(plan.encode())
            Manifest(step, len(everyone), mesh, files).write(self.folder)
            _check_sizes(self.folder, files, {})
        except OSError as error:
            raise _cannot_be_written(error, self.folder, "") from error


def _described(item: Item) -> Any:
    """What tells the planner how an item lies."""
    return item.value if item.source is None else item.source


def _cannot_be_written(error: OSError, folder: Path, tensor: str) -> CheckpointError:
    path = error.filename if error.filename is not None else folder
    while_writing = f", while {tensor} was written" if tensor else ""
    return CheckpointError(
        f"{path} cannot be written{while_writing}: {error.strerror or error}. What was complete before still is, and "
        "training can go on."
    )


class Stored:
    """A complete checkpoint, to read.

    Args:
        folder: where it lies.

    Raises:
        CheckpointError: it is damaged, as far as one sees without reading what it holds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        _check_sizes(folder, {_METADATA: self.manifest.files[_METADATA]}, {})
        self._check_blocks(_METADATA, range(len(self.manifest.files[_METADATA].blocks)), {})
        self._metadata: Metadata = pickle.loads((folder / _METADATA).read_bytes())
        self._held: dict[str, list[tuple[int, int, str]]] = {}
        for index, place in self._metadata.storage_data.items():
            where = (place.offset, place.offset + place.length, index.fqn)
            self._held.setdefault(place.relative_path, []).append(where)
        _check_sizes(folder, self.manifest.files, self._held)

    def __contains__(self, name: str) -> bool:
        return name in self._metadata.state_dict_metadata

    def tensor(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Shape and type of a tensor that it holds."""
        found = self._metadata.state_dict_metadata[name]
        assert isinstance(found, TensorStorageMetadata), f"{name} is no tensor"
        return found.size, found.properties.dtype

    def plan_reads(self, state: dict[str, Any]) -> Reads:
        """What this rank has to read for `state`: tensors, which are written over, and what is no tensor.

        Raises:
            CheckpointError: a byte of it is another one than was written.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self._metadata, False)
        reader = FileSystemReader(self.folder)
        reader.set_up_storage_reader(self._metadata, False)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        self._check(plan)
        return Reads(reader, planner, plan)

    def _check(self, plan: LoadPlan) -> None:
        blocks: dict[str, set[int]] = {}
        for item in plan.items:
            place = self._metadata.storage_data[item.storage_index]
            last = place.offset + max(place.length, 1) - 1
            needed = range(place.offset // BLOCK_BYTES, last // BLOCK_BYTES + 1)
            blocks.setdefault(place.relative_path, set()).update(needed)
        for name, needed in blocks.items():
            self._check_blocks(name, sorted(needed), self._held)

    def _check_blocks(self, name: str, blocks: Iterable[int], held: Mapping[str, list[tuple[int, int, str]]]) -> None:
        path = self.folder / name
        try:
            found = next(iter(damaged_blocks(path, self.manifest.files[name], blocks)), None)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}. {refused(self.folder)}") from error
        if found is None:
            return
        start, end = found * BLOCK_BYTES, (found + 1) * BLOCK_BYTES
        there = [place for place in held.get(name, ()) if place[0] < end and place[1] > start]
        tensors = [tensor for _, _, tensor in _damaged_items(path, there) or there]
        raise CheckpointError(
            f"{path} is damaged: its bytes from {start} on are not those that were written{_holding(tensors)}. "
            f"{refused(self.folder)}"
        )


@dataclass(frozen=True, slots=True)
class Reads:
    """What a rank is going to read, found undamaged."""

    _reader: FileSystemReader
    _planner: DefaultLoadPlanner
    _plan: LoadPlan

    def run(self) -> None:
        """Read it, into the state that it was planned for."""
        self._reader.read_data(self._planner.finish_plan(self._plan), self._planner).wait()


def _damaged_items(path: Path, there: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Those of some items of a file that show the damage: each is a ZIP archive with checksums of its own."""
    found = []
    with path.open("rb") as file:
        for first, last, tensor in there:
            file.seek(first)
            if _is_damaged(file.read(last - first)):
                found.append((first, last, tensor))
    return found


_UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, ValueError, RuntimeError, OSError, EOFError)
"""What zipfile raises for archives that are none."""


def _is_damaged(data: bytes) -> bool:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return archive.testzip() is not None
    except _UNREADABLE:
        return True


def _check_sizes(folder: Path, files: Mapping[str, Sums], held: Mapping[str, list[tuple[int, int, str]]]) -> None:
    for name, sums in files.items():
        path = folder / name
        try:
            found = path.stat().st_size
        except FileNotFoundError as error:
            tensors = [tensor for _, _, tensor in held.get(name, ())]
            raise CheckpointError(
                f"{path} is missing{_holding(tensors)}. Every rank must see the folder (a file system that hosts "
                f"share). {refused(folder)}"
            ) from error
        if found != sums.size_bytes:
            tensors = [tensor for _, last, tensor in held.get(name, ()) if last > found]
            raise CheckpointError(
                f"{path} is damaged: it has {found} bytes, and {sums.size_bytes} were written{_holding(tensors)}. "
                f"{refused(folder)}"
            )


def _holding(tensors: Sequence[str]) -> str:
    """`, of model.a, model.b and 3 more`."""
    if not tensors:
        return ""
    more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    return f" (of {', '.join(tensors[:_SHOWN])}{more})"
