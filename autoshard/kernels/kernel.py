"""What is known of a Triton kernel: the operator it may stand in for, when, and how to compile it ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch._ops import OpOverload

from autoshard.kernels.launch import Tile

# Specimens are made for rows of these many elements: several rows a program, one row, the longest.
SPECIMEN_COLUMNS = (200, 4096, 16384)


@dataclass(frozen=True, slots=True)
class Specimen:
    """One representative compilation of a `@triton.jit` function.

    Args:
        function: the `@triton.jit` function.
        signature: every argument's triton type in order, e.g. `{"x_ptr": "*bf16", "rows": "i32"}`;
            "constexpr" for those in `constants`.
        constants: the values of the `constexpr` arguments (None for an absent pointer).
        num_warps: warps per program.
    """

    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object] = field(default_factory=dict)
    num_warps: int = 4

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.fn.__name__


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Triton implementation of an operator.

    Args:
        operator: the operator that it may stand in for.
        replacement: takes the same arguments and gives the same results, so that rewriting a node is
            changing its target. Results may be wider: statistics are float32 where ATen's are half.
        why_not: called with the operator's own arguments (fake tensors will do); None where the kernel
            applies, else the reason, one sentence. It does not look at the device: plans for a GPU are made
            on machines without one.
        specimens: compilations that tests and cost models may ask for, one per `SPECIMEN_COLUMNS`.
    """

    operator: OpOverload
    replacement: OpOverload
    why_not: Callable[..., str | None]
    specimens: tuple[Specimen, ...]

    @property
    def name(self) -> str:
        """The replacement's name, e.g. "autoshard::triton_layer_norm"."""
        return self.replacement._schema.name


def specimen(function: Any, types: str, tile: Tile, **constants: object) -> Specimen:
    """A `Specimen` from the types of the run-time arguments in order, separated by spaces.

    Args:
        function: the `@triton.jit` function; its last two arguments are BLOCK_R and BLOCK_C.
        types: triton types, e.g. `"*bf16 i32"`; None is an absent pointer.
        tile: the values of BLOCK_R and BLOCK_C, and the warps.
        constants: the values of the other `constexpr` arguments.
    """
    names, kinds = list(function.arg_names), types.split()
    absent = {name: None for name, kind in zip(names, kinds, strict=False) if kind == "None"}
    signature = dict(zip(names, kinds, strict=False)) | dict.fromkeys(absent, "constexpr")
    signature |= dict.fromkeys(names[len(kinds) :], "constexpr")
    blocks = {"BLOCK_R": tile.rows, "BLOCK_C": tile.columns}
    return Specimen(function, signature, absent | constants | blocks, tile.num_warps)
