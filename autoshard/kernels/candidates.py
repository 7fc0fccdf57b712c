"""What a kernel may be launched with: the heuristic's block sizes, warps and stages, and their neighbours.

A neighbour is one step away, a factor of two or one stage, in one block size, in the warps or in the stages; or in a
block size and the warps alike, so that each thread keeps its work. The block sizes that are not in `TUNABLE` cover a
whole row or head, or are written into what the kernel reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

# 64 KiB of shared memory hold no more iterations of a loop than this, where an H100's 228 KiB hold three.
MAX_STAGES_HIP = 2
_MAX_STAGES = 4
_MAX_WARPS = 16
# Elements of a tile for each thread of a warp of 32: with fewer, threads idle; with more, tiles leave the registers.
_MIN_PER_THREAD, _MAX_PER_THREAD = 1, 64
# A matrix product takes no side shorter than 16, and on an H100 four warps.
_MIN_SIDE, _MAX_SIDE, _MIN_PRODUCT_WARPS = 16, 256, 4

_BOTH = ("BLOCK_R", "BLOCK_C")
_ROWS = ("BLOCK_R",)
_SIDES = ("BLOCK_M", "BLOCK_N")
# By the name of its function, the block sizes of a kernel that may vary; of others only the warps may.
TUNABLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention_delta_kernel": ("BLOCK_M",),
        "attention_forward_kernel": _SIDES,
        "attention_keys_kernel": _SIDES,
        "attention_queries_kernel": _SIDES,
        "bias_gelu_backward_kernel": _BOTH,
        "bias_gelu_forward_kernel": _BOTH,
        "combine_backward_kernel": _ROWS,
        "combine_kernel": _BOTH,
        "cross_entropy_backward_kernel": _BOTH,
        "cross_entropy_forward_kernel": _BOTH,
        "dropout_kernel": _BOTH,
        "embedding_backward_kernel": _BOTH,
        "embedding_kernel": _BOTH,
        "gated_backward_kernel": _BOTH,
        "gated_forward_kernel": _BOTH,
        "grouped_depth_kernel": (*_SIDES, "BLOCK_K"),
        "grouped_rows_kernel": (*_SIDES, "BLOCK_K"),
        "norm_backward_kernel": _ROWS,
        "norm_forward_kernel": _ROWS,
        "permute_kernel": _BOTH,
        "rotary_kernel": ("BLOCK_S",),
        "softmax_backward_kernel": _ROWS,
        "softmax_forward_kernel": _ROWS,
        "split_cross_entropy_backward_kernel": _BOTH,
        "split_cross_entropy_forward_kernel": _BOTH,
    }
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a kernel is launched with.

    Args:
        blocks: the `constexpr` arguments that may vary, with their values.
        num_warps: warps of a program.
        num_stages: iterations of a loop that load ahead; None for a kernel without such a loop.
    """

    blocks: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int | None = None

    def __str__(self) -> str:
        """For example "BLOCK_M 128, BLOCK_N 64, 8 warps, 3 stages"."""
        blocks = "".join(f"{name} {size}, " for name, size in self.blocks)
        return f"{blocks}{self.num_warps} warps" + ("" if self.num_stages is None else f", {self.num_stages} stages")


def choice_of(
    constants: Mapping[str, object], tunable: Sequence[str], num_warps: int, num_stages: int | None = None
) -> tuple[Choice, dict[str, object]]:
    """The heuristic's choice, and those of a kernel's `constexpr` arguments that do not vary."""
    blocks = {name: value for name, value in constants.items() if name in tunable and isinstance(value, int)}
    fixed = {name: value for name, value in constants.items() if name not in blocks}
    stages = min(num_stages, MAX_STAGES_HIP) if num_stages is not None and torch.version.hip else num_stages
    return Choice(tuple(blocks.items()), num_warps, stages), fixed


def neighbours(choice: Choice, fixed: Mapping[str, object]) -> tuple[Choice, ...]:
    """What may be chosen in a heuristic's place, itself first.

    Args:
        choice: the heuristic's.
        fixed: the kernel's other `constexpr` arguments, of which BLOCK_* are sides of its tile.
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
    if choice.num_stages is not None:
        yield from (replace(choice, num_stages=choice.num_stages + step) for step in (-1, 1))


def _per_thread(choice: Choice, sides: Mapping[str, int]) -> float:
    """Elements of a tile for each thread."""
    return math.prod(size for _, size in choice.blocks) * math.prod(sides.values()) / (32 * choice.num_warps)


def _is_sensible(choice: Choice, sides: Mapping[str, int], least: float) -> bool:
    """Whether a candidate keeps within the limits of this file; tiny rows have fewer elements than threads anyway."""
    if choice.num_stages is not None:
        most = MAX_STAGES_HIP if torch.version.hip else _MAX_STAGES
        is_product = all(_MIN_SIDE <= size <= _MAX_SIDE for _, size in choice.blocks)
        return is_product and _MIN_PRODUCT_WARPS <= choice.num_warps <= _MAX_WARPS and 1 <= choice.num_stages <= most
    if not 1 <= choice.num_warps <= _MAX_WARPS or any(size < 1 for _, size in choice.blocks):
        return False
    return least <= _per_thread(choice, sides) <= _MAX_PER_THREAD
