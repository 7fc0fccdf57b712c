"""Memory in bytes: allocator rounding, peak by liveness, optimizer state.

Rounding follows PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp): blocks are multiples of 512 B;
segments asked of the driver are 2 MiB for blocks up to 1 MiB, 20 MiB for blocks under 10 MiB, else multiples of 2 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cost_models.errors import CostArgumentError
from cost_models.units import MIB, ceil_div

BLOCK_BYTES = 512
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
SMALL_LIMIT_BYTES = MIB
LARGE_LIMIT_BYTES = 10 * MIB

# Moments that an optimizer keeps per parameter (torch.optim); `step` is one float32 scalar per tensor.
MOMENTS: Mapping[str, int] = {"sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2}


def round_block(tensor_bytes: int) -> int:
    """Bytes that an allocation takes: the next multiple of 512 B, zero for an empty tensor."""
    return ceil_div(_checked(tensor_bytes), BLOCK_BYTES) * BLOCK_BYTES


def round_segment(block_bytes: int) -> int:
    """Bytes that the allocator asks of the driver for one block: 2 MiB, 20 MiB, or the next multiple of 2 MiB."""
    if _checked(block_bytes) == 0:
        return 0
    if block_bytes <= SMALL_LIMIT_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < LARGE_LIMIT_BYTES:
        return LARGE_SEGMENT_BYTES
    return ceil_div(block_bytes, SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES


def peak(events: Iterable[tuple[int, int, int]]) -> int:
    """Largest sum of bytes alive at once.

    Args:
        events: (birth, death, bytes), alive during [birth, death): a value last used by step t dies at t + 1, so the
            operands and results of one step are alive together.

    Example:
        >>> peak([(0, 2, 100), (1, 3, 50), (2, 4, 70)])
        150
    """
    return max((alive for _, alive in usage(events)), default=0)


def usage(events: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """(time, bytes alive from then on), in order of time; see `peak` for `events`."""
    changes: dict[int, int] = {}
    for birth, death, size in events:
        if death < birth:
            raise CostArgumentError(f"A value is born at {birth} and dies before, at {death}.")
        changes[birth] = changes.get(birth, 0) + _checked(size)
        changes[death] = changes.get(death, 0) - size
    alive, points = 0, []
    for time in sorted(changes):
        alive += changes[time]
        points.append((time, alive))
    return points


def optimizer_state_bytes(elements: int, optimizer: str, itemsize: int, *, master_weights: bool = False) -> int:
    """Bytes of optimizer state for one parameter tensor of `elements` elements.

        moments[optimizer] * elements * itemsize + 4 (the step, float32, if there are moments but for SGD)
        + 4 * elements with float32 master weights

    Raises:
        CostArgumentError: an unknown optimizer; names those known.
    """
    if optimizer not in MOMENTS:
        raise CostArgumentError(
            f"Unknown optimizer {optimizer!r}. Known: {', '.join(MOMENTS)}; add it to memory.MOMENTS."
        )
    step = 4 if optimizer.startswith("adam") else 0
    master = 4 * elements if master_weights else 0
    return MOMENTS[optimizer] * _checked(elements) * itemsize + step + master


def _checked(size: int) -> int:
    if size < 0:
        raise CostArgumentError(f"bytes={size!r} is negative.")
    return size
