"""Finds the loops that a kernel needs to compute a group of operators, from the shapes of the group's values.

A loop runs over an *axis*. Every dim of every value is a product of axes, major to minor, as in `(batch heads) -> batch
heads`. Axes are found in three steps:
1. Each dim of each value starts as one axis. Dims of size 1 have no axis.
2. Each call makes axes of its operands equal to axes of its result. A pointwise call equates all dims that are not
   broadcast. A reduction equates the dims that it keeps. A `view` equates the list of all axes before and after. Lists
   are compared from the left. If two compared axes differ in size, the larger axis is split into two.
3. Axes that reductions sum over become the columns of the kernel's tile. The other axes become its rows.

A group has loops under four conditions. No value has an axis twice. All reductions sum over the same axes. One value
has all axes. All results vary along all rows. Then each program computes whole rows, and each element of a result is
stored once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autoshard.kernels.generated.group import Group, GroupStep
from autoshard.kernels.generated.operators import POINTWISE, IndexKind, kind_of, reduced_dims

_aten = torch.ops.aten
Dims = tuple[tuple[int, ...], ...]
"""For each dim of a value, the numbers of its axes, major to minor."""


class NoLoopsError(Exception):
    """One kernel cannot compute the operators of a group. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Loops:
    """The loops of a group.

    Args:
        rows, columns: the sizes of the row axes and of the column axes, major to minor. Reductions sum over columns.
        strides: from the number of an operand or result to its stride along each axis, in elements. Row axes come
            first. The stride is 0 if the value does not vary along the axis.
        spans: for each value, two bools: whether the value varies along rows, and whether it varies along columns.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    strides: Mapping[int, tuple[int, ...]]
    spans: tuple[tuple[bool, bool], ...]

    @property
    def row_count(self) -> int:
        """The number of rows of the kernel's tile: the product of the sizes of all row axes."""
        return math.prod(self.rows)

    @property
    def column_count(self) -> int:
        """The elements of a row: the product of the sizes of all column axes."""
        return math.prod(self.columns)


def find_loops(group: Group) -> Loops:
    """Return the loops of a group.

    Neighbouring axes are merged into one axis if every tensor is contiguous over both axes.

    Raises:
        NoLoopsError: the group has no loops.
    """
    if any(0 in value.shape for value in group.values):
        raise NoLoopsError("a value has no elements.")
    axes = _Axes()
    dims: list[Dims] = [axes.fresh(value.shape) for value in group.operands]
    summed: list[tuple[int, Dims, tuple[int, ...]]] = []
    for step in group.steps:
        dims.append(_apply(axes, group, dims, step))
        if kind_of(step.target) is IndexKind.REDUCTION:
            (operand,) = step.operands
            summed.append((operand, dims[operand], reduced_dims(step, group.values[operand])))
    whole = [tuple(axes.resolve(dim) for dim in value) for value in dims]
    flat = [[axis for dim in value for axis in dim] for value in whole]
    if any(len(set(items)) < len(items) for items in flat):
        raise NoLoopsError("a value would be read at two of its positions at once.")
    reduced = _reduced(axes, summed)
    order = _order(group, flat)
    rows = [axis for axis in order if axis not in reduced]
    _check_results(group, flat, set(rows))
    _check_costly(group, flat, set(rows))
    columns = [axis for axis in order if axis in reduced]
    strides = {
        index: _strides(axes, whole[index], group.values[index].stride, [*rows, *columns])
        for index in (*range(len(group.operands)), *group.results)
    }
    spans = tuple((not reduced.issuperset(items), not reduced.isdisjoint(items)) for items in flat)
    return _collapse([axes.sizes[axis] for axis in rows], [axes.sizes[axis] for axis in columns], strides, spans)


@dataclass(slots=True)
class _Axes:
    """The axes of a group, numbered from 0.

    Args:
        parts: from an axis to the axes that replace it: the axes that it was split into, or its equal axis.
    """

    sizes: list[int] = field(default_factory=list)
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def fresh(self, shape: Iterable[int]) -> Dims:
        return tuple(() if size == 1 else (self._add(size),) for size in shape)

    def _add(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def resolve(self, items: Iterable[int]) -> tuple[int, ...]:
        """Return the axes that replace `items` after all splits so far, major to minor."""
        found: list[int] = []
        for axis in items:
            found += self.resolve(self.parts[axis]) if axis in self.parts else (axis,)
        return tuple(found)

    def equate(self, left: Iterable[int], right: Iterable[int]) -> None:
        """Make two lists of axes equal, major to minor.

        Axes are compared pair by pair. If the sizes of a pair differ, the larger axis is split into two axes. Raise
        `NoLoopsError` if no such splits make the lists equal.
        """
        firsts, seconds = deque(left), deque(right)
        while firsts and seconds:
            first, second = self._next(firsts), self._next(seconds)
            if first == second:
                continue
            low, high = sorted((self.sizes[first], self.sizes[second]))
            if high % low:
                raise NoLoopsError(f"a view splits {high} elements across groups of {low}.")
            if low == high:
                self.parts[max(first, second)] = (min(first, second),)
            else:
                larger, queue = (first, firsts) if self.sizes[first] == high else (second, seconds)
                other, others = (second, seconds) if larger == first else (first, firsts)
                self.parts[larger] = (self._add(low), self._add(high // low))
                queue.extendleft(reversed(self.parts[larger]))
                others.appendleft(other)
        if firsts or seconds:
            raise NoLoopsError("values have different numbers of elements.")

    def _next(self, queue: deque[int]) -> int:
        axis = queue.popleft()
        while axis in self.parts:
            queue.extendleft(reversed(self.parts[axis]))
            axis = queue.popleft()
        return axis


def _apply(axes: _Axes, group: Group, dims: Sequence[Dims], step: GroupStep) -> Dims:
    """Make new axes for the result of `step`, equate them with its operands' axes, and return the result's dims."""
    shape = step.value.shape
    made = axes.fresh(shape)
    match kind_of(step.target):
        case IndexKind.POINTWISE:
            for index in step.operands:
                _equate_aligned(axes, dims[index], made)
        case IndexKind.REDUCTION:
            (index,) = step.operands
            gone = reduced_dims(step, group.values[index])
            kept = [axis for place, dim in enumerate(dims[index]) if place not in gone for axis in dim]
            axes.equate(kept, [axis for dim in made for axis in dim])
        case IndexKind.VIEW:
            _apply_view(axes, step, dims[step.operands[0]], made)
    return made


def _apply_view(axes: _Axes, step: GroupStep, before: Dims, made: Dims) -> None:
    if step.target is _aten.expand.default:
        _equate_aligned(axes, before, made)
        return
    count = len(before)
    order = list(range(count))
    if step.target is _aten.permute.default:
        order = [dim % count for dim in step.args[1]]
    elif step.target is _aten.transpose.int:
        first, second = (dim % count for dim in step.args[1:3])
        order[first], order[second] = order[second], order[first]
    elif step.target is _aten.t.default:
        order.reverse()
    axes.equate([axis for dim in order for axis in before[dim]], [axis for dim in made for axis in dim])


def _equate_aligned(axes: _Axes, operand: Dims, result: Dims) -> None:
    """Equate the axes of an operand's dims with those of the result's dims, aligned at the last dim as in broadcasting.

    An operand's dim of size 1 has no axis, and is skipped.
    """
    for before, after in zip(reversed(operand), reversed(result), strict=False):
        if before:
            axes.equate(before, after)


def _reduced(axes: _Axes, summed: Sequence[tuple[int, Dims, tuple[int, ...]]]) -> frozenset[int]:
    """Return the axes that all reductions sum over. Raise `NoLoopsError` if reductions sum over different axes.

    `summed` has, for each reduction, the number and dims of its operand, and the indices of the reduced dims.
    """
    found = {frozenset(axis for place in places for axis in axes.resolve(dims[place])) for _, dims, places in summed}
    found.discard(frozenset())
    if len(found) > 1:
        raise NoLoopsError("reductions sum over different dims.")
    return next(iter(found), frozenset())


def _order(group: Group, flat: Sequence[Sequence[int]]) -> list[int]:
    """Return all axes of a group, in their order in a value that has all of them.

    `flat` has the axes of each value. The value is the first one with all axes among the group's results, then the
    results of all steps, then the operands. Raise `NoLoopsError` if no value has all axes.
    """
    every = {axis for items in flat for axis in items}
    steps = range(len(group.operands), len(flat))
    for index in (*group.results, *steps, *range(len(group.operands))):
        if every == set(flat[index]):
            return list(flat[index])
    raise NoLoopsError("no value varies along all axes.")


def _check_results(group: Group, flat: Sequence[Sequence[int]], rows: set[int]) -> None:
    if any(not rows.issubset(flat[index]) for index in group.results):
        raise NoLoopsError("a result has fewer rows than other values.")


def _check_costly(group: Group, flat: Sequence[Sequence[int]], rows: set[int]) -> None:
    """Raise `NoLoopsError` if a kernel would compute a costly operator (`Pointwise.is_costly`) again for each row.

    This is so if the operator's result does not vary along all axes `rows`. `flat` has the axes of each value.
    """
    for index, step in enumerate(group.steps, len(group.operands)):
        entry = POINTWISE.get(step.target)
        if entry is not None and entry.is_costly and not rows.issubset(flat[index]):
            raise NoLoopsError(f"{step.name} would be computed again for every row.")


def _strides(axes: _Axes, dims: Dims, stride: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of a tensor along each axis of `order`, in elements, or 0 if the tensor lacks the axis."""
    found: dict[int, int] = {}
    for dim, step in zip(dims, stride, strict=True):
        for axis in reversed(dim):
            found[axis] = step
            step *= axes.sizes[axis]
    return tuple(found.get(axis, 0) for axis in order)


def _collapse(
    rows: Sequence[int],
    columns: Sequence[int],
    strides: Mapping[int, tuple[int, ...]],
    spans: tuple[tuple[bool, bool], ...],
) -> Loops:
    """Return loops in which neighbouring axes are merged if every tensor is contiguous over both axes.

    `rows`, `columns`, `strides` and `spans` are the fields of `Loops` before axes are merged.
    """
    sizes = [*rows, *columns]
    starts = [
        place
        for place in range(len(sizes))
        if place in (0, len(rows)) or any(own[place - 1] != own[place] * sizes[place] for own in strides.values())
    ]
    ends = [*starts[1:], len(sizes)][: len(starts)]
    merged = [math.prod(sizes[start:end]) for start, end in zip(starts, ends, strict=True)]
    count = sum(start < len(rows) for start in starts)
    kept = {index: tuple(own[end - 1] for end in ends) for index, own in strides.items()}
    return Loops(tuple(merged[:count]), tuple(merged[count:]), kept, spans)
