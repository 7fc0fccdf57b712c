"""Launch configurations that a kernel may have: the heuristic's block sizes and warps, and their neighbours.

A neighbour is one step away, a factor of two, in one block size or in the warps. It may also differ in a block size
and the warps alike, so that each thread keeps its work. Block sizes that are not in `TUNABLE` cover a whole row or
head, or determine the operands' layout.
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
        "dropout_kernel": _BOTH,
        "gated_backward_kernel": _BOTH,
        "gated_forward_kernel": _BOTH,
        "norm_backward_kernel": _ROWS,
        "norm_forward_kernel": _ROWS,
        "rotary_kernel": ("BLOCK_S",),
        "softmax_backward_kernel": _ROWS,
        "softmax_forward_kernel": _ROWS,
        "split_cross_entropy_backward_kernel": _BOTH,
        "split_cross_entropy_forward_kernel": _BOTH,
    }
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A launch configuration of a kernel.

    Args:
        blocks: the `constexpr` arguments that may vary, with their values.
        num_warps: the warps of a program.
    """

    blocks: tuple[tuple[str, int], ...]
    num_warps: int

    def __str__(self) -> str:
        """Format the choice, such as "BLOCK_R 2, BLOCK_C 64, 8 warps"."""
        blocks = "".join(f"{name} {size}, " for name, size in self.blocks)
        return f"{blocks}{self.num_warps} warps"


def choice_of(
    constants: Mapping[str, object], tunable: Sequence[str], num_warps: int
) -> tuple[Choice, dict[str, object]]:
    """The heuristic's choice, and the `constexpr` arguments that do not vary."""
    blocks = {name: value for name, value in constants.items() if name in tunable and isinstance(value, int)}
    fixed = {name: value for name, value in constants.items() if name not in blocks}
    return Choice(tuple(blocks.items()), num_warps), fixed


def neighbours(choice: Choice, fixed: Mapping[str, object]) -> tuple[Choice, ...]:
    """The candidates that may replace a heuristic's choice; the choice itself is first.

    Args:
        choice: the heuristic's choice.
        fixed: the kernel's other `constexpr` arguments; BLOCK_* among them are sides of its tile.
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
    """Elements of a tile per thread."""
    return math.prod(size for _, size in choice.blocks) * math.prod(sides.values()) / (32 * choice.num_warps)


def _is_sensible(choice: Choice, sides: Mapping[str, int], least: float) -> bool:
    """Whether a candidate keeps within the limits of this file; tiny rows have fewer elements than threads anyway."""
    if not 1 <= choice.num_warps <= _MAX_WARPS or any(size < 1 for _, size in choice.blocks):
        return False
    return least <= _per_thread(choice, sides) <= _MAX_PER_THREAD
