"""The files of a checkpoint: torch.distributed.checkpoint plans which bytes each rank writes and reads."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    Metadata,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from autoshard.checkpoints import contents as tables
from autoshard.checkpoints import manifest as manifests
from autoshard.checkpoints.contents import Contents, Extent
from autoshard.checkpoints.manifest import BLOCK_BYTES, Manifest, Summer, Sums, damaged_blocks, refused
from autoshard.checkpoints.snapshot import Item
from autoshard.errors import CheckpointError

PLAN = "plan.json"
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Written:
    """One rank's report: torch's plan of its writes, each item's place, and each file's size and checksums."""

    plan: SavePlan
    extents: Mapping[MetadataIndex, Extent]
    files: Mapping[str, Sums]


class Writer:
    """Writes this rank's part of a checkpoint into a folder. `rank` is this rank's number among the saving ranks."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self._name = f"__{rank}_0.distcp"

    def write(self, items: dict[str, Item]) -> Written:
        """Write this rank's items to the disk, and return the report on the writes.

        `items` is emptied, so written copies are freed.

        Raises:
            CheckpointError: a file cannot be written; the message names the file and the tensor.
        """
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: _described(item) for name, item in items.items()})
        plan, values = planner.create_local_plan(), {name: item.value for name, item in items.items()}
        items.clear()
        path, summer, writing, start = self.folder / self._name, Summer(), "", 0
        extents: dict[MetadataIndex, Extent] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for item in plan.items:
                    writing = item.index.fqn
                    data = _bytes_of(values.pop(writing))
                    file.write(data)
                    summer.add(data)
                    extents[item.index] = Extent(self._name, start, len(data), zlib.crc32(data))
                    start += len(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _cannot_be_written(error, path, writing) from error
        return Written(plan, extents, {self._name: summer.sums()})

    def finish(self, everyone: Sequence[Written], step: int, mesh: str, plan: str | None) -> None:
        """On the first rank: write the table of contents, the plan and the manifest.

        Args:
            everyone: the `Written` of each rank.
            step: the number of steps done.
            mesh: the mesh as text, for people.
            plan: the plan as JSON text, or None.

        Raises:
            CheckpointError: a file cannot be written, or the file of a rank is missing.
        """
        files = {name: sums for written in everyone for name, sums in written.files.items()}
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        _, metadata = planner.create_global_plan([written.plan for written in everyone])
        try:
            extents = {index: extent for written in everyone for index, extent in written.extents.items()}
            texts = {tables.NAME: Contents.of(metadata, extents).to_json()}
            if plan is not None:
                texts[PLAN] = plan.encode()
            for name, text in texts.items():
                manifests.write_through(self.folder / name, text)
                files[name] = manifests.sums_of(text)
            Manifest(step, len(everyone), mesh, files).write(self.folder)
            _check_sizes(self.folder, files, {})
        except OSError as error:
            raise _cannot_be_written(error, self.folder, "") from error


def _described(item: Item) -> Any:
    """Return the object from which the planner reads an item's shape and sharding: a tensor, or a state's bytes."""
    return item.value if item.source is None else item.source


def _bytes_of(value: Any) -> memoryview:
    """Return the bytes of a tensor in row-major order; a state is bytes already."""
    if not isinstance(value, torch.Tensor):
        return memoryview(value)
    flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data).cast("B") if flat.numel() else memoryview(b"")


def _cannot_be_written(error: OSError, path: Path, tensor: str) -> CheckpointError:
    while_writing = f", while {tensor} was written" if tensor else ""
    return CheckpointError(
        f"{error.filename or path} cannot be written{while_writing}: {error.strerror or error}. The previous "
        "checkpoints are intact, and training can go on."
    )


class Stored:
    """A complete checkpoint, to read.

    Raises:
        CheckpointError: a file's size or the table of contents shows damage.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        if tables.NAME not in self.manifest.files:
            raise CheckpointError(f"{folder} does not list {tables.NAME} among its files. {refused(folder)}")
        _check_sizes(folder, {tables.NAME: self.manifest.files[tables.NAME]}, {})
        self._check_blocks(tables.NAME, range(len(self.manifest.files[tables.NAME].blocks)), {})
        self.metadata = Contents.read(folder, self.manifest.files).metadata()
        self._held: dict[str, list[tuple[Extent, str]]] = {}
        for index, extent in self.metadata.storage_data.items():
            self._held.setdefault(extent.file, []).append((extent, index.fqn))
        _check_sizes(folder, self.manifest.files, self._held)

    def __contains__(self, name: str) -> bool:
        return name in self.metadata.state_dict_metadata

    def tensor(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Return the whole shape and the dtype of a tensor in the checkpoint."""
        found = self.metadata.state_dict_metadata[name]
        assert isinstance(found, TensorStorageMetadata), f"{name} is no tensor"
        return found.size, found.properties.dtype

    def plan_reads(self, state: dict[str, Any]) -> Callable[[], None]:
        """Plan this rank's reads, and check the bytes that they need. Return a function that then reads into `state`.

        `state` maps names in the checkpoint to tensors, which are overwritten, or to other values, which are replaced
        by bytes.

        Raises:
            CheckpointError: a byte to read differs from the written byte.
        """
        planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self.metadata, False)
        reader = CheckpointReader(self.folder)
        reader.set_up_storage_reader(self.metadata, False)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        self._check(plan)
        return lambda: reader.read_data(planner.finish_plan(plan), planner).wait()

    def _check(self, plan: LoadPlan) -> None:
        blocks: dict[str, set[int]] = {}
        for item in plan.items:
            extent = self.metadata.storage_data[item.storage_index]
            end = -(-(extent.start + extent.length) // BLOCK_BYTES)
            needed = range(extent.start // BLOCK_BYTES, end) if extent.length else ()
            blocks.setdefault(extent.file, set()).update(needed)
        for name, needed in blocks.items():
            self._check_blocks(name, sorted(needed), self._held)

    def _check_blocks(self, name: str, blocks: Iterable[int], held: _Held) -> None:
        path = self.folder / name
        try:
            found = next(iter(damaged_blocks(path, self.manifest.files[name], blocks)), None)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}. {refused(self.folder)}") from error
        if found is None:
            return
        start, end = found * BLOCK_BYTES, (found + 1) * BLOCK_BYTES
        there = [
            (extent, item)
            for extent, item in held.get(name, ())
            if extent.start < end and extent.start + extent.length > start
        ]
        tensors = [tensor for _, tensor in _damaged_items(path, there) or there]
        raise CheckpointError(
            f"{path} is damaged: its bytes from {start} on differ from the written bytes{_holding(tensors)}. "
            f"{refused(self.folder)}"
        )


class _LoadPlanner(DefaultLoadPlanner):
    """A planner that reads a state as bytes. Torch's planner would unpickle them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = value.getvalue()


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint by `torch.distributed.checkpoint`: `dcp.load(state, storage_reader=CheckpointReader(path))`.

    Args:
        path: the folder of a checkpoint, such as `Checkpoints.latest`.

    Example:
        >>> import tempfile, autoshard, torch.distributed.checkpoint as dcp
        >>> checkpoints = autoshard.Checkpoints(tempfile.mkdtemp(), asynchronous=False)
        >>> checkpoints.save(torch.nn.Linear(2, 2), at=1)
        True
        >>> CheckpointReader(checkpoints.latest).read_metadata().state_dict_metadata["model.weight"].size
        torch.Size([2, 2])
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read names, dtypes, shapes and places of all tensors and states in the checkpoint."""
        return Stored(Path(self.path)).metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare to read by `metadata`; a method of `StorageReader`."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._boxes = {
            MetadataIndex(name, chunk.offsets): (item.properties.dtype, chunk.sizes)
            for name, item in metadata.state_dict_metadata.items()
            if isinstance(item, TensorStorageMetadata)
            for chunk in item.chunks
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of `plan` into the planner's tensors; a method of `StorageReader`."""
        for item in plan.items:
            data = self._bytes_at(self.storage_data[item.storage_index])
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(data))
                continue
            dtype, shape = self._boxes[item.storage_index]
            flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
            stored = flat.reshape(shape)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _bytes_at(self, extent: Extent) -> bytearray:
        with (Path(self.path) / extent.file).open("rb") as file:
            file.seek(extent.start)
            data = bytearray(extent.length)
            file.readinto(data)
        return data


_Held = Mapping[str, Sequence[tuple[Extent, str]]]
"""Name of a file → the byte ranges in it, each with the name of its tensor or state."""


def _damaged_items(path: Path, there: Sequence[tuple[Extent, str]]) -> list[tuple[Extent, str]]:
    """Return the entries of `there` (bytes of the file, tensor's name) whose bytes do not match their checksum."""
    found = []
    with path.open("rb") as file:
        for extent, tensor in there:
            file.seek(extent.start)
            if zlib.crc32(file.read(extent.length)) != extent.crc32:
                found.append((extent, tensor))
    return found


def _check_sizes(folder: Path, files: Mapping[str, Sums], held: _Held) -> None:
    for name, sums in files.items():
        path = folder / name
        try:
            found = path.stat().st_size
        except FileNotFoundError as error:
            tensors = [tensor for _, tensor in held.get(name, ())]
            raise CheckpointError(
                f"{path} is missing{_holding(tensors)}. Every rank must see the folder (a file system that hosts "
                f"share). {refused(folder)}"
            ) from error
        if found != sums.size_bytes:
            tensors = [tensor for extent, tensor in held.get(name, ()) if extent.start + extent.length > found]
            raise CheckpointError(
                f"{path} is damaged: it has {found} bytes instead of {sums.size_bytes}{_holding(tensors)}. "
                f"{refused(folder)}"
            )


def _holding(tensors: Sequence[str]) -> str:
    """Return the names of tensors as text, e.g. ` (of model.a, model.b and 3 more)`; "" without names."""
    if not tensors:
        return ""
    more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    return f" (of {', '.join(tensors[:_SHOWN])}{more})"
