"""Leave out blocks of a deep model before it is traced for planning: of a long run of alike blocks, both ends stay.

Before → after: `layers = [A, A, A, ..., A]`, 32 of them, becomes `[A, A, A, A]`, and a `Repeat` remembers that 28 lie
between the second and the third. What repeats may be several blocks long (`[A, B, A, B, ...]`). Blocks are alike as in
`shorten`, and keep their parameters' names.

That a program of the short model tells what the whole one does, holds where the model treats alike blocks alike;
`passes.strategies.elided` checks on the program what can be seen there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from autoshard.errors import TraceError
from autoshard.ir.repeat import Repeat
from autoshard.tracing.shorten import block_lists, with_lists

LEAST_ELIDED = 4
"""Fewer units than so many are not worth leaving out."""

_MOST_PERIOD = 8


@dataclass(frozen=True, slots=True)
class ElidedModel:
    """A model with blocks left out, which shares its parameters with the whole one."""

    model: nn.Module
    repeats: tuple[Repeat, ...]


class _Kept(nn.ModuleList):
    """The blocks of a list that stay, under their own names; indices count those that are left."""

    def _get_abs_string_index(self, idx: int) -> str:  # what torch's own indexing goes by
        return list(self._modules)[idx]


def _keep(blocks: nn.ModuleList, kept: Sequence[int]) -> nn.ModuleList:
    found = _Kept()
    found._modules.update({str(number): blocks[number] for number in kept})
    return found


def elide_blocks(model: nn.Module, margin: int, least: int = LEAST_ELIDED) -> ElidedModel | None:
    """The model without the inner units of its long runs of alike blocks; None where there are none.

    Args:
        model: any module; blocks are entries of module lists that are in no other one.
        margin: units that stay at each end of a run beside the two that the elided ones lie between.
        least: units that a run must lose for it to be worth it.
    """
    repeats = [
        Repeat(path, *place) for path, _, kinds in block_lists(model) for place in inner_runs(kinds, margin, least)
    ]
    return ElidedModel(without(model, repeats), tuple(repeats)) if repeats else None


def without(model: nn.Module, repeats: Sequence[Repeat]) -> nn.Module:
    """The model without the units that repeats say are elided; it shares its parameters with the whole one.

    Raises:
        TraceError: the model does not have such blocks.
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


def inner_runs(kinds: Sequence[int], margin: int, least: int = LEAST_ELIDED) -> Iterator[tuple[int, int, int]]:
    """Period, first block ahead and first block behind of the elided units of each run; see `elide_blocks`."""
    start = 0
    while start < len(kinds):
        period, units = _longest_run(kinds, start)
        elided = units - 2 * (margin + 1)
        if elided < max(1, least):
            start += 1
            continue
        before = start + margin * period
        yield period, before, before + (elided + 1) * period
        start += units * period


def _longest_run(kinds: Sequence[int], start: int) -> tuple[int, int]:
    """The period from `start` on that covers the most blocks (the shortest of those), and how many units it covers."""
    best = (1, 0)
    for period in range(1, _MOST_PERIOD + 1):
        end = start + period
        while end < len(kinds) and kinds[end] == kinds[end - period]:
            end += 1
        units = (end - start) // period
        if units > 1 and units * period > best[0] * best[1]:
            best = (period, units)
    return best
