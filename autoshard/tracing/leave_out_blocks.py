"""Leaves out blocks of a deep model before it is traced for planning. A long run of equal blocks keeps only its ends.

Before → after: `layers = [A, A, A, ..., A]`, 32 of them, becomes `[A, A, A, A]`, and a `Repeat` records that 28 blocks
are missing between the second and the third. Several blocks may repeat together (`[A, B, A, B, ...]`): a unit is the
blocks that repeat. `shorten` says which blocks are equal. Blocks keep their parameters' names.

The short model's program represents the whole model if the model treats equal blocks equally.
`passes.strategies.repeated` checks this on the program as far as it is visible there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from autoshard.errors import TraceError
from autoshard.ir.repeat import Repeat
from autoshard.tracing.shorten import block_lists, with_lists

LEAST_LEFT_OUT = 4
"""A run keeps all its blocks if fewer units than this would be left out. A unit is the blocks that repeat."""

_MOST_PERIOD = 8


@dataclass(frozen=True, slots=True)
class ModelWithGaps:
    """A model without the blocks that `repeats` leaves out. It shares its parameters with the whole model."""

    model: nn.Module
    repeats: tuple[Repeat, ...]


class _Kept(nn.ModuleList):
    """The remaining blocks of a module list, under their original names. An index counts only the remaining blocks."""

    def _get_abs_string_index(self, idx: int) -> str:  # torch's own indexing calls it
        return list(self._modules)[idx]


def _keep(blocks: nn.ModuleList, kept: Sequence[int]) -> nn.ModuleList:
    found = _Kept()
    found._modules.update({str(number): blocks[number] for number in kept})
    return found


def leave_out_blocks(model: nn.Module, margin: int, least: int = LEAST_LEFT_OUT) -> ModelWithGaps | None:
    """Return the model without the inner blocks of its long runs of equal blocks; None without such runs.

    A unit is the blocks that repeat in a run: one block, or several in turn.

    Args:
        model: any module; blocks are entries of outermost module lists.
        margin: units kept at each end of a run, in addition to one unit on each side of the gap.
        least: a run keeps all its blocks if fewer units than this would be left out.
    """
    repeats = [
        Repeat(path, *place) for path, _, kinds in block_lists(model) for place in inner_runs(kinds, margin, least)
    ]
    return ModelWithGaps(without(model, repeats), tuple(repeats)) if repeats else None


def without(model: nn.Module, repeats: Sequence[Repeat]) -> nn.Module:
    """Return the model without the blocks that `repeats` leave out.

    Raises:
        TraceError: the model has no list of blocks at a path of `repeats`, or the list is too short.
    """
    lists = {path: blocks for path, blocks, _ in block_lists(model)}
    replaced: dict[str, nn.ModuleList] = {}
    for path in dict.fromkeys(repeat.path for repeat in repeats):
        inner = [range(item.before + item.period, item.behind) for item in repeats if item.path == path]
        if path not in lists or any(numbers.stop >= len(lists[path]) for numbers in inner):
            raise TraceError(f"{type(model).__name__} has no list of blocks {path!r} as long as the plan says.")
        kept = [number for number in range(len(lists[path])) if not any(number in numbers for numbers in inner)]
        replaced[path] = _keep(lists[path], kept)
    return with_lists(model, replaced)


def inner_runs(kinds: Sequence[int], margin: int, least: int = LEAST_LEFT_OUT) -> Iterator[tuple[int, int, int]]:
    """Yield the place of each gap that a long run of equal units gets, as (period, before, behind) of a `Repeat`.

    `period` is the number of blocks of a unit. `before` is the first block of the last unit before the gap, and
    `behind` the first block after the gap. `kinds` has the kind of each block; `margin` and `least` are those of
    `leave_out_blocks`.
    """
    start = 0
    while start < len(kinds):
        period, units = _longest_run(kinds, start)
        left_out = units - 2 * (margin + 1)
        if left_out < max(1, least):
            start += 1
            continue
        before = start + margin * period
        yield period, before, before + (left_out + 1) * period
        start += units * period


def _longest_run(kinds: Sequence[int], start: int) -> tuple[int, int]:
    """Return the period and the number of units of the longest run that begins at block `start`.

    The period is the number of blocks in a unit. Among equally long runs, the shortest period counts. Without a run,
    the result is (1, 0).
    """
    best = (1, 0)
    for period in range(1, _MOST_PERIOD + 1):
        end = start + period
        while end < len(kinds) and kinds[end] == kinds[end - period]:
            end += 1
        units = (end - start) // period
        if units > 1 and units * period > best[0] * best[1]:
            best = (period, units)
    return best
