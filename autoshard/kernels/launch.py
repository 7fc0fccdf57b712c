"""Defines operators that launch Triton kernels, and helps with tile sizes, views of rows, and unsupported operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch._ops import OpOverload

from autoshard.errors import KernelError
from autoshard.kernels.candidates import TUNABLE, choice_of
from autoshard.kernels.library import define
from autoshard.kernels.tuning import Launch, choose
from autoshard.kernels.tuning_switch import active_tuning

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Registers hold a row: 16384 float32 in 16 warps are 32 registers per thread and array.
MAX_COLUMNS = 16384
_TILE_ELEMENTS = 2048

Refuse = Callable[..., str | None]
"""A function that takes an operator's arguments by name, and returns why its kernel does not take them, or None."""

# The names of each operator's arguments, and its function `refuse`.
_DEFINED: dict[OpOverload, tuple[Sequence[str], Refuse]] = {}


def define_kernel(
    name: str,
    schema: str,
    fake: Callable[..., Any],
    fill: Callable[..., None],
    refuse: Refuse = lambda **_: None,
) -> OpOverload:
    """Define the operator `autoshard::name`, which runs Triton kernels, and return it.

    The three functions take the operator's arguments by name. For unsupported operands, the operator raises
    `KernelError`, and never falls back to another implementation.

    Args:
        schema: arguments and returns, such as `"(Tensor x) -> Tensor"`.
        fake: returns empty results: a tensor, or a tuple of tensors.
        fill: takes these results first, and writes them.
        refuse: returns why the kernels do not take the operands, or None if they do. Float tensors must have a dtype of
            `FLOATS` in any case.
    """

    def named(operands: Sequence[object]) -> dict[str, Any]:
        return dict(zip(names, operands, strict=True))

    def run(*operands: object) -> Any:
        arguments = named(operands)
        reason = why_not(operator, **arguments)
        if reason is not None:
            raise KernelError(f"{name} does not apply: {reason} Use the operator that it replaces.")
        results = fake(**arguments)
        fill(results, **arguments)
        return results

    operator = define(name, schema, run, lambda *operands: fake(**named(operands)))
    names = [argument.name for argument in operator._schema.arguments]
    _DEFINED[operator] = (names, refuse)
    return operator


def why_not(operator: OpOverload, *operands: object, **named: object) -> str | None:
    """Return why the kernel of an operator does not take these operands, or None if it does.

    Operands are real or fake, by position or by name. Their device does not matter, because plans for a GPU are made
    without one. `operator` is a result of `define_kernel`.
    """
    names, refuse = _DEFINED[operator]
    arguments = dict(zip(names, operands, strict=False)) | named
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype not in FLOATS:
            return f"{name} has dtype {value.dtype}; the kernel takes float32, bfloat16 and float16."
    return refuse(**arguments)


@dataclass(frozen=True, slots=True)
class Tile:
    """The rows and columns that one Triton program computes together, with `num_warps` warps. All are powers of 2."""

    rows: int
    columns: int
    num_warps: int

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `launch`: BLOCK_R, BLOCK_C and the warps."""
        return {"BLOCK_R": self.rows, "BLOCK_C": self.columns, "num_warps": self.num_warps}


def row_tile(columns: int, max_columns: int = MAX_COLUMNS) -> Tile:
    """Return the tile for rows of `columns` elements.

    A tile is at most `max_columns` wide. A program computes longer rows in several blocks.
    """
    width = min(triton.next_power_of_2(max(columns, 1)), max_columns)
    rows = max(1, min(16, _TILE_ELEMENTS // width))
    return Tile(rows, width, num_warps=max(4, min(16, width // 512)))


def cdiv(count: int, size: int) -> int:
    """Return `count / size`, rounded up. `triton.cdiv` is slower: it takes 5 us, several times in a launch."""
    return -(-count // size)


def over_rows(rows: int) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    """Return a function from block sizes by name to the launch grid: one program for each BLOCK_R rows."""
    return lambda blocks: (cdiv(rows, blocks["BLOCK_R"]),)


def over_pieces(rows: int, columns: int) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    """Return a function from block sizes by name to the launch grid: a program for each tile of BLOCK_R by BLOCK_C."""
    return lambda blocks: (cdiv(rows, blocks["BLOCK_R"]), cdiv(columns, blocks["BLOCK_C"]))


def as_rows(x: Tensor, columns: int) -> Tensor:
    """Return `x` as [rows, columns] with stride 1 along columns. The result is a copy only if no such view exists."""
    matrix = x.reshape(-1, columns)
    return matrix if columns == 1 or matrix.stride(1) == 1 else matrix.contiguous()


def refuse_columns(columns: int) -> str | None:
    """Return why a kernel that holds whole rows does not support rows of `columns` elements, or None if it does."""
    if 1 <= columns <= MAX_COLUMNS:
        return None
    return f"a row has {columns} elements; the kernel holds whole rows of 1 to {MAX_COLUMNS}."


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
    """Run a `@triton.jit` function on `device`. With an empty grid, run nothing.

    While tuning is active, the tuner may replace the given block sizes and warps by faster ones.

    Args:
        grid: maps block sizes by name to the number of programs along each axis of the grid.
        arguments: the arguments that are not `constexpr`, in order.
        tunable: names of the `constexpr` arguments that tuning may change. The default is the kernel's entry in
            `TUNABLE`.
        follow: maps the tunable `constexpr` arguments by name to further `constexpr` arguments that depend on them.
        changes: the tensors that the kernel both reads and writes.
        constants: the `constexpr` arguments by name, with the default block sizes.

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
        call.run(choice if tuning is None else choose(tuning, call, choice))


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `device` is the current CUDA device, because Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
