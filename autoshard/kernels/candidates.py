"""Launch configurations that tuning tries for a kernel: the default block sizes and warps, and their neighbours.

The kernel's launcher computes the default from the operands' shapes. A neighbour doubles or halves one block size, the
number of warps, or both. Only the block sizes in `TUNABLE` vary. A kernel's other block sizes must cover a whole row or
head, or they determine a memory layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

_MAX_WARPS = 16
# Elements of a tile per thread of a warp of 32. With fewer elements threads idle; with more, tiles leave the registers.
_MIN_PER_THREAD, _MAX_PER_THREAD = 1, 64

_BOTH = ("BLOCK_R", "BLOCK_C")
_ROWS = ("BLOCK_R",)
# The block sizes of a kernel that may vary, by the name of its function. Other kernels may only vary their warps.
TUNABLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bias_gelu_backward_kernel": _BOTH,
        "bias_gelu_forward_kernel": _BOTH,
        "cross_entropy_backward_kernel": _BOTH,
        "cross_entropy_forward_kernel": _BOTH,
        "dequantize_nf4_kernel": ("BLOCK",),
        "dropout_kernel": _BOTH,
        "gated_backward_kernel": _BOTH,
        "gated_forward_kernel": _BOTH,
        "norm_backward_kernel": _ROWS,
        "norm_forward_kernel": _ROWS,
        "rotary_kernel": ("BLOCK_S",),
        "split_cross_entropy_backward_kernel": _BOTH,
        "split_cross_entropy_forward_kernel": _BOTH,
    }
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel's launch configuration: its tunable `constexpr` arguments by name, and the warps of a program."""

    blocks: tuple[tuple[str, int], ...]
    num_warps: int

    def __str__(self) -> str:
        blocks = "".join(f"{name} {size}, " for name, size in self.blocks)
        return f"{blocks}{self.num_warps} warps"


def choice_of(
    constants: Mapping[str, object], tunable: Sequence[str], num_warps: int
) -> tuple[Choice, dict[str, object]]:
    """Split a launch's `constexpr` arguments, by name, into tunable block sizes and all other arguments.

    Return the default configuration, which has the block sizes and `num_warps`, and a dict of the other arguments.
    `tunable` has the names of the tunable block sizes.
    """
    blocks = {name: value for name, value in constants.items() if name in tunable and isinstance(value, int)}
    fixed = {name: value for name, value in constants.items() if name not in blocks}
    return Choice(tuple(blocks.items()), num_warps), fixed


def neighbours(choice: Choice, fixed: Mapping[str, object]) -> tuple[Choice, ...]:
    """Return the configurations that tuning tries. The default `choice` is the first.

    Args:
        fixed: the `constexpr` arguments that tuning keeps. Names that start with BLOCK are side lengths of the tile.
    """
    around = (choice, *_steps(choice))
    sides = {name: value for name, value in fixed.items() if name.startswith("BLOCK") and isinstance(value, int)}
    least = min(_MIN_PER_THREAD, _per_thread(choice, sides))
    return tuple(dict.fromkeys(item for item in around if item == choice or _is_sensible(item, sides, least)))


def _steps(choice: Choice) -> Iterator[Choice]:
    for factor in (0.5, 2):
        warps = replace(choice, num_warps=int(choice.num_warps * factor))
        yield warps
        for name, size in choice.blocks:
            blocks = tuple((own, int(size * factor) if own == name else value) for own, value in choice.blocks)
            yield replace(choice, blocks=blocks)
            yield replace(warps, blocks=blocks)


def _per_thread(choice: Choice, sides: Mapping[str, int]) -> float:
    return math.prod(size for _, size in choice.blocks) * math.prod(sides.values()) / (32 * choice.num_warps)


def _is_sensible(choice: Choice, sides: Mapping[str, int], least: float) -> bool:
    """Whether a configuration keeps the limits of warps and of tile elements per thread.

    `sides` has the tile's side lengths that tuning keeps, by name. `least` is the lower limit of elements per thread.
    """
    if not 1 <= choice.num_warps <= _MAX_WARPS or any(size < 1 for _, size in choice.blocks):
        return False
    return least <= _per_thread(choice, sides) <= _MAX_PER_THREAD
