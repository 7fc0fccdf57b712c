"""PyTorch's CUDA caching allocator in numbers: what `max_memory_allocated` and `max_memory_reserved` will say.

Follows c10/cuda/CUDACachingAllocator.cpp with its default settings (no expandable segments, no limit on splitting):

1. A request is rounded up to multiples of 512 B. Up to 1 MiB it is served from the small pool, else from the large one.
2. The smallest free block of the pool that fits is taken. It is split if what is left is at least 512 B in the small
   pool, more than 1 MiB in the large one; unsplit, all of it counts as allocated.
3. If none fits, a segment is asked of the driver: 2 MiB, 20 MiB, or from 10 MiB on the next multiple of 2 MiB. Its rest
   is a free block.
4. A freed block joins its free neighbours of the same segment. Segments are kept.

What lies outside of it (the context, NCCL's buffers) is in `memory`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from cost_models.constants import load
from cost_models.errors import CostArgumentError
from cost_models.units import ceil_div


@dataclass(frozen=True, slots=True)
class AllocatorRules:
    """The allocator's constants, in bytes; see the file cost_models/data/software/torch_cuda_allocator.toml."""

    block: int
    small_limit: int
    small_segment: int
    large_limit: int
    large_segment: int
    segment_rounding: int

    def round_block(self, size: int) -> int:
        """Bytes that a request takes: the next multiple of 512 B, zero for an empty tensor."""
        return ceil_div(_checked(size), self.block) * self.block

    def round_segment(self, block: int) -> int:
        """Bytes that are asked of the driver for one block."""
        if _checked(block) == 0:
            return 0
        if block <= self.small_limit:
            return self.small_segment
        if block < self.large_limit:
            return self.large_segment
        return ceil_div(block, self.segment_rounding) * self.segment_rounding

    def is_split(self, block: int, rest: int) -> bool:
        """Whether a free block is cut when a request of `block` bytes leaves `rest` of it."""
        return rest >= self.block if block <= self.small_limit else rest > self.small_limit


@lru_cache(maxsize=1)
def allocator_rules() -> AllocatorRules:
    """The rules of the present allocator, from the data files."""
    file = load("software", "torch_cuda_allocator")
    names = ("block", "small_limit", "small_segment", "large_limit", "large_segment", "segment_rounding")
    return AllocatorRules(*(int(file.number(name, "B")) for name in names))


@dataclass(frozen=True, slots=True)
class AllocatorPeak:
    """What a run came to, in bytes: `requested` by tensors, `allocated` in blocks, `reserved` in segments.

    Each is the largest that it was at any time; `allocated` and `reserved` are torch.cuda's max_memory_allocated() and
    max_memory_reserved().
    """

    requested: int
    allocated: int
    reserved: int


def replay(events: Iterable[tuple[int, int, int]], rules: AllocatorRules | None = None) -> AllocatorPeak:
    """Run the allocator over values that live from birth to death.

    Args:
        events: (birth, death, bytes), alive during [birth, death). At one time frees come before allocations, both in
            the order given, as a run does it that frees operands before it makes the next result.
        rules: the allocator's; default: PyTorch's present ones.

    Raises:
        CostArgumentError: negative bytes, or a death before its birth.

    Example:
        >>> replay([(0, 2, 3 * 2**20), (1, 3, 3 * 2**20), (2, 4, 3 * 2**20)])
        AllocatorPeak(requested=6291456, allocated=6291456, reserved=20971520)
    """
    heap = _Heap(rules or allocator_rules())
    steps: list[tuple[int, int, int, int]] = []
    for index, (birth, death, size) in enumerate(events):
        if death < birth:
            raise CostArgumentError(f"A value is born at {birth} and dies before, at {death}.")
        if _checked(size) > 0 and death > birth:
            steps += [(birth, 1, index, size), (death, 0, index, size)]
    for _, is_birth, index, size in sorted(steps):
        if is_birth:
            heap.allocate(index, size)
        else:
            heap.free(index, size)
    return AllocatorPeak(heap.peak_requested, heap.peak_allocated, heap.reserved)


@dataclass(slots=True)
class _Heap:
    """Blocks are (segment, offset) to size; free ones also in a list per pool, sorted by size."""

    rules: AllocatorRules
    requested: int = 0
    allocated: int = 0
    reserved: int = 0
    peak_requested: int = 0
    peak_allocated: int = 0
    _segments: list[int] = field(default_factory=list)
    _is_small: list[bool] = field(default_factory=list)
    _free: dict[bool, list[tuple[int, int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    _before: dict[tuple[int, int], int] = field(default_factory=dict)
    _held: dict[int, tuple[int, int]] = field(default_factory=dict)

    def allocate(self, index: int, size: int) -> None:
        """Best fit, else a new segment; then the rest is split off."""
        block = self.rules.round_block(size)
        pool = self._free[block <= self.rules.small_limit]
        place = bisect_left(pool, (block, 0, 0))
        if place < len(pool):
            found, segment, offset = pool.pop(place)
        else:
            found, segment, offset = self.rules.round_segment(block), len(self._segments), 0
            self._segments.append(found)
            self._is_small.append(block <= self.rules.small_limit)
            self.reserved += found
        rest = found - block
        if self.rules.is_split(block, rest):
            self._put(segment, offset + block, rest, offset, block <= self.rules.small_limit)
            found = block
        self._sizes[segment, offset] = found
        self._held[index] = segment, offset
        self.requested += size
        self.allocated += found
        self.peak_requested = max(self.peak_requested, self.requested)
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def _put(self, segment: int, offset: int, size: int, before: int, small: bool) -> None:
        """A free block behind the one at `before`; the block behind it learns its new neighbour."""
        insort(self._free[small], (size, segment, offset))
        self._sizes[segment, offset] = size
        self._before[segment, offset] = before
        if offset + size < self._segments[segment]:
            self._before[segment, offset + size] = offset

    def free(self, index: int, size: int) -> None:
        """Give a block back, joined with its free neighbours."""
        segment, offset = self._held.pop(index)
        found = self._sizes.pop((segment, offset))
        self.requested -= size
        self.allocated -= found
        small = self._is_small[segment]
        behind = offset + found
        if behind < self._segments[segment] and self._is_free(segment, behind, small):
            found += self._take(segment, behind, small)
        before = self._before.get((segment, offset), -1)
        if offset > 0 and self._is_free(segment, before, small):
            found += self._take(segment, before, small)
            offset = before
        self._put(segment, offset, found, self._before.get((segment, offset), -1), small)

    def _is_free(self, segment: int, offset: int, small: bool) -> bool:
        entry = (self._sizes.get((segment, offset), -1), segment, offset)
        pool = self._free[small]
        place = bisect_left(pool, entry)
        return place < len(pool) and pool[place] == entry

    def _take(self, segment: int, offset: int, small: bool) -> int:
        size = self._sizes.pop((segment, offset))
        pool = self._free[small]
        pool.pop(bisect_left(pool, (size, segment, offset)))
        return size


def _checked(size: int) -> int:
    if size < 0:
        raise CostArgumentError(f"bytes={size!r} is negative.")
    return size
