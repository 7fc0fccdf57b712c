"""The table of contents of a checkpoint, `metadata.json`: where each piece of a tensor and each state lies.

A state is the state dict of an object without its tensors. Tensors are stored as their bytes, states as JSON
(`values`). Nothing is pickled, so reading a checkpoint runs no code.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from autoshard.checkpoints.manifest import Sums, refused
from autoshard.checkpoints.values import dtype_named, name_of
from autoshard.errors import CheckpointError, PlanMismatchError
from autoshard.ir.read_json import parse, read

NAME = "metadata.json"


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes in a file of a checkpoint, and their checksum."""

    file: str
    start: int
    length: int
    crc32: int


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A rectangular piece of a tensor; `offset` is the index of its first element in the tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    extent: Extent


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, stored in pieces. `dtype` is a name such as "float32"; `shape` is the whole shape."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    def is_whole(self) -> bool:
        """Whether the pieces can make up the tensor.

        Each piece must lie in the tensor, and have as many bytes as its shape needs. All pieces together must have at
        least the tensor's number of elements.
        """
        itemsize = dtype_named(self.dtype).itemsize
        for piece in self.pieces:
            if not len(piece.offset) == len(piece.shape) == len(self.shape):
                return False
            boxes = zip(piece.offset, piece.shape, self.shape, strict=True)
            if not all(start >= 0 and size >= 0 and start + size <= whole for start, size, whole in boxes):
                return False
            if piece.extent.length != math.prod(piece.shape) * itemsize:
                return False
        return sum(math.prod(piece.shape) for piece in self.pieces) >= math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Contents:
    """The places of a checkpoint's tensors and states in its files, by their names in the checkpoint."""

    tensors: Mapping[str, StoredTensor]
    states: Mapping[str, Extent]

    @classmethod
    def of(cls, metadata: Metadata, extents: Mapping[MetadataIndex, Extent]) -> Contents:
        """Return the contents for the metadata of torch.distributed.checkpoint.

        `extents` has the place of each piece and state in the files.
        """
        tensors, states = {}, {}
        for name, item in metadata.state_dict_metadata.items():
            if isinstance(item, BytesStorageMetadata):
                states[name] = extents[MetadataIndex(name)]
                continue
            pieces = [
                StoredPiece(tuple(chunk.offsets), tuple(chunk.sizes), extents[MetadataIndex(name, chunk.offsets)])
                for chunk in item.chunks
            ]
            tensors[name] = StoredTensor(name_of(item.properties.dtype), tuple(item.size), tuple(pieces))
        return cls(tensors, states)

    def to_json(self) -> bytes:
        """Return the text of `metadata.json`, which `read` reads."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()

    @classmethod
    def read(cls, folder: Path, files: Mapping[str, Sums]) -> Contents:
        """Read the contents of the checkpoint in `folder`, whose manifest has `files` (name to size and checksums).

        Raises `CheckpointError` if the table is missing, is damaged, or names bytes that no file has.
        """
        path = folder / NAME
        try:
            found = read(cls, parse(path.read_text(encoding="utf-8")))
            is_sound = all(_lies_in(files, extent) for extent in found.extents().values())
            is_sound = is_sound and all(tensor.is_whole() for tensor in found.tensors.values())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}. {refused(folder)}") from error
        except (ValueError, PlanMismatchError) as error:
            raise CheckpointError(
                f"{path} is damaged, or Checkpoints did not write it: it is not a table of contents. {refused(folder)}"
            ) from error
        if not is_sound:
            raise CheckpointError(
                f"{path} is damaged, or Checkpoints did not write it: it names bytes that no file of the checkpoint "
                f"has. {refused(folder)}"
            )
        return found

    def extents(self) -> dict[MetadataIndex, Extent]:
        """Return where each piece and each state lies, by its index in `torch.distributed.checkpoint`."""
        pieces = {
            MetadataIndex(name, piece.offset): piece.extent
            for name, tensor in self.tensors.items()
            for piece in tensor.pieces
        }
        return pieces | {MetadataIndex(name): extent for name, extent in self.states.items()}

    def metadata(self) -> Metadata:
        """Return the contents as the metadata from which `torch.distributed.checkpoint` plans reads."""
        tensors = {
            name: TensorStorageMetadata(
                TensorProperties(dtype_named(tensor.dtype)),
                torch.Size(tensor.shape),
                [ChunkStorageMetadata(torch.Size(item.offset), torch.Size(item.shape)) for item in tensor.pieces],
            )
            for name, tensor in self.tensors.items()
        }
        states = {name: BytesStorageMetadata() for name in self.states}
        return Metadata({**tensors, **states}, storage_data=self.extents())


def _lies_in(files: Mapping[str, Sums], extent: Extent) -> bool:
    has_file = extent.file in files and extent.start >= 0 and extent.length >= 0
    return has_file and extent.start + extent.length <= files[extent.file].size_bytes
