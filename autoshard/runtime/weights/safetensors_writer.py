"""Write a safetensors file block by block, so that not all tensors are in memory.

The format (https://github.com/huggingface/safetensors#format) begins with the length of the header in 8 bytes,
little-endian. The header is JSON of each tensor's dtype, shape and offsets. The values follow, without gaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from autoshard.errors import WeightsError
from autoshard.runtime.weights.unread import Unread

_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 8


def check_types(tensors: Mapping[str, Unread]) -> None:
    """Raise `WeightsError` if a tensor has a dtype that the format lacks."""
    without = [f"{name!r} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in _NAMES]
    if without:
        raise WeightsError(f"Safetensors files have no dtype for {', '.join(without)}. Convert the model first.")


def in_file_order(tensors: Mapping[str, Unread]) -> list[str]:
    """Return the tensors' names in the order of the file: wide dtypes first, so that values are aligned."""
    return sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)


class SafetensorsWriter:
    """A context that writes the file `path`.

    Pass the values of the tensors to `write`: tensor by tensor in the order of `in_file_order`, each in one or several
    blocks of consecutive elements.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Unread]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in in_file_order(tensors):
            tensor = tensors[name]
            place = [offset, offset + tensor.nbytes]
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
            offset = place[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, values: torch.Tensor) -> None:
        """Append `values`, the next elements of a tensor, to the file (see `SafetensorsWriter` for the order)."""
        flat = values.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            self._file.write(flat.view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file. If the context raised no error, first wait until the whole file is on the disk."""
        try:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
