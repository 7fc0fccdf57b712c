"""How Triton kernels are launched: tile sizes, views of rows, and the errors of what cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from autoshard.errors import KernelError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# What block sizes are chosen by: A100 and its like, H100 and later, MI300.
ARCHITECTURES = ("sm_80", "sm_90", "gfx942")
# 64 KiB of shared memory hold no more iterations of a loop than this, where an H100's 228 KiB hold three.
MAX_STAGES_HIP = 2
# A row is held in registers: 16384 float32 in 16 warps are 32 registers a thread for each array.
MAX_COLUMNS = 16384
_TILE_ELEMENTS = 2048


@dataclass(frozen=True, slots=True)
class Tile:
    """The rows and columns (powers of two) that one program holds, and its warps."""

    rows: int
    columns: int
    num_warps: int


@cache
def architecture_of(device: torch.device) -> str:
    """Which of `ARCHITECTURES` a device's block sizes are chosen by; a CPU, which interprets, counts as an H100."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip:
        return "gfx942"
    return "sm_90" if torch.cuda.get_device_capability(device) >= (9, 0) else "sm_80"


def row_tile(columns: int, max_columns: int = MAX_COLUMNS) -> Tile:
    """The tile for rows of `columns` elements; wider rows than `max_columns` are walked in blocks of that."""
    width = min(triton.next_power_of_2(max(columns, 1)), max_columns)
    rows = max(1, min(16, _TILE_ELEMENTS // width))
    return Tile(rows, width, num_warps=max(4, min(16, width // 512)))


def as_rows(x: Tensor, columns: int) -> Tensor:
    """`x` as [rows, columns] with adjacent columns; a copy only where the layout has no such view."""
    matrix = x.reshape(-1, columns)
    return matrix if columns == 1 or matrix.stride(1) == 1 else matrix.contiguous()


def refuse_dtypes(**tensors: Tensor | None) -> str | None:
    """The reason why a kernel does not take these tensors' dtypes, or None."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            return f"{name} has dtype {tensor.dtype}; the kernel takes float32, bfloat16 and float16."
    return None


def refuse_columns(columns: int) -> str | None:
    """The reason why a kernel that holds whole rows does not take rows this long, or None."""
    if 1 <= columns <= MAX_COLUMNS:
        return None
    return f"a row has {columns} elements; the kernel holds whole rows of 1 to {MAX_COLUMNS}."


def require(name: str, reason: str | None) -> None:
    """Raise `KernelError` with the reason, if there is one."""
    if reason is not None:
        raise KernelError(f"{name} does not apply: {reason} Use the operator that it stands in for.")


def launch(
    kernel: Any,
    grid: Sequence[int],
    device: torch.device,
    *arguments: object,
    num_warps: int,
    num_stages: int | None = None,
    **constants: object,
) -> None:
    """Run a `@triton.jit` function over `grid` on `device`; an empty grid runs nothing.

    Raises:
        KernelError: the tensors are not on a GPU, and the kernel was not loaded for Triton's interpreter.
    """
    is_interpreted = not isinstance(kernel, triton.JITFunction)
    if device.type != "cuda" and not is_interpreted:
        raise KernelError(
            f"Triton kernel {kernel.fn.__name__} needs tensors on a GPU; found device={str(device)!r}. "
            "To run it in Triton's interpreter set TRITON_INTERPRET=1 before importing its module."
        )
    if 0 in grid:
        return
    with _current(device):
        options = {} if num_stages is None else {"num_stages": _stages(num_stages)}
        kernel[tuple(grid)](*arguments, **constants, **options, num_warps=num_warps, enable_fp_fusion=True)


def _stages(num_stages: int) -> int:
    return min(num_stages, MAX_STAGES_HIP) if torch.version.hip else num_stages


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensors' one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
