"""The launch of Triton kernels: tile sizes, views of rows, and errors for unsupported operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from autoshard.errors import KernelError
from autoshard.kernels.candidates import TUNABLE, choice_of
from autoshard.kernels.tuning import Launch, tuner_of
from autoshard.kernels.tuning_switch import active_tuning

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Registers hold a row: 16384 float32 in 16 warps are 32 registers per thread and array.
MAX_COLUMNS = 16384
_TILE_ELEMENTS = 2048


@dataclass(frozen=True, slots=True)
class Tile:
    """The block of a tensor that one Triton program computes (powers of two), and the program's number of warps."""

    rows: int
    columns: int
    num_warps: int


def row_tile(columns: int, max_columns: int = MAX_COLUMNS) -> Tile:
    """The tile for rows of `columns` elements. A program walks wider rows than `max_columns` block by block."""
    width = min(triton.next_power_of_2(max(columns, 1)), max_columns)
    rows = max(1, min(16, _TILE_ELEMENTS // width))
    return Tile(rows, width, num_warps=max(4, min(16, width // 512)))


def cdiv(count: int, size: int) -> int:
    """The number of blocks of `size` that cover `count`; `triton.cdiv` takes 5 us, and a launch needs several."""
    return -(-count // size)


def over_rows(rows: int) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    """A grid of blocks of rows."""
    return lambda blocks: (cdiv(rows, blocks["BLOCK_R"]),)


def over_pieces(rows: int, columns: int) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    """A grid of blocks of rows, and of blocks of columns."""
    return lambda blocks: (cdiv(rows, blocks["BLOCK_R"]), cdiv(columns, blocks["BLOCK_C"]))


def as_rows(x: Tensor, columns: int) -> Tensor:
    """`x` as [rows, columns] with adjacent columns; a copy only if there is no such view."""
    matrix = x.reshape(-1, columns)
    return matrix if columns == 1 or matrix.stride(1) == 1 else matrix.contiguous()


def refuse_dtypes(**tensors: Tensor | None) -> str | None:
    """The reason that a kernel does not support these tensors' dtypes, or None."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            return f"{name} has dtype {tensor.dtype}; the kernel takes float32, bfloat16 and float16."
    return None


def refuse_columns(columns: int) -> str | None:
    """The reason that a kernel of whole rows does not support rows of this length, or None."""
    if 1 <= columns <= MAX_COLUMNS:
        return None
    return f"a row has {columns} elements; the kernel holds whole rows of 1 to {MAX_COLUMNS}."


def require(name: str, reason: str | None) -> None:
    """Raise `KernelError` with the reason, if there is one."""
    if reason is not None:
        raise KernelError(f"{name} does not apply: {reason} Use the operator that it replaces.")


def launch(
    kernel: Any,
    grid: Callable[[Mapping[str, Any]], tuple[int, ...]],
    device: torch.device,
    *arguments: object,
    num_warps: int,
    tunable: Sequence[str] | None = None,
    follow: Callable[[Mapping[str, int]], Mapping[str, int]] = lambda blocks: {},
    changes: Sequence[Tensor] = (),
    **constants: object,
) -> None:
    """Run a `@triton.jit` function on `device`; an empty grid runs nothing.

    Args:
        kernel: the function.
        grid: maps block sizes by name to the number of programs along each axis.
        device: the device of the tensors.
        arguments: the arguments that are not `constexpr`, in order.
        num_warps: the heuristic's number of warps.
        tunable: the constants that tuning may change; default: the kernel's entry in `TUNABLE`.
        follow: computes further constants from the tunable constants.
        changes: the tensors that the kernel reads and writes.
        constants: the `constexpr` arguments, including the heuristic's block sizes.

    Raises:
        KernelError: the tensors are not on a GPU, and the kernel was not loaded for Triton's interpreter.
    """
    names = TUNABLE.get(kernel.fn.__name__, ()) if tunable is None else tunable
    choice, fixed = choice_of(constants, names, num_warps)
    call = Launch(kernel, grid, device, arguments, fixed, follow, changes)
    if device.type != "cuda" and not call.is_interpreted:
        raise KernelError(
            f"Triton kernel {kernel.fn.__name__} needs tensors on a GPU; found device={str(device)!r}. "
            "To run it in Triton's interpreter set TRITON_INTERPRET=1 before importing its module."
        )
    if 0 in grid(constants):
        return
    tuning = active_tuning()
    with _current(device):
        call.run(choice if tuning is None else tuner_of(tuning).choose(call, choice))


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make the tensors' device the current device, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
