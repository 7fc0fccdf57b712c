"""Compute weights from the record of their initialisers: part by part if possible, else whole and then sliced.

A record (`Initialisation`) lists operations on numbered memories. A tensor of the record is a view of a memory
(`StridedView`). A box is a rectangular part of a tensor.

A weight can be computed by parts if its values are drawn, filled, or computed elementwise from tensors of its shape.
Boxes of it may be written too, such as a row of zeros for padding. The formula of a weight is the expression tree that
gives the values of any box. Any other weight (such as an orthogonal matrix) is computed whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.ir.initialisation import Box, Initialisation, Operation, StridedView

_AT_ONCE = 1 << 15
"""At most this many elements are computed at once, so that they fit in a processor's cache."""

_RANDOM = "autoshard::random"
_EMPTY = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided")


class _NotByPartsError(Exception):
    """A value cannot be computed part by part."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A formula: random numbers, drawn by an operation that can draw any part of a tensor alone."""

    operation: Operation


@dataclass(frozen=True, slots=True)
class _Before:
    """A formula: the weight's value before initialisation. If `is_empty`, it is uninitialised memory."""

    dtype: torch.dtype
    is_empty: bool


@dataclass(frozen=True, slots=True)
class _Applied:
    """A formula: the result of an elementwise operation. An operand of None is the tensor that the operation writes."""

    operation: Operation
    operands: tuple[_Formula | torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class _BoxedValue:
    """A formula: the values of a tensor after writes to boxes (rectangular parts) of the tensor.

    Args:
        first: the values before the writes.
        writes: for each write the box, the dims of the box that its view has, and the operation that writes to the
            view. The view lacks dims in which the box has size 1.
    """

    first: _Formula
    writes: tuple[tuple[Box, tuple[int, ...], _Applied], ...]


_Formula = _Drawn | _Before | _Applied | _BoxedValue


@dataclass(slots=True)
class Replay:
    """Computes initial values of weights from a record of initialisers.

    All ranks must call `pieces` for the same weights in the same order.

    Args:
        record: the record.
        seed: the seed of random numbers, a 0-dim tensor. Values are computed on its device.
        whole_of: takes the name of a weight, and returns its whole value before initialisation.
    """

    record: Initialisation
    seed: torch.Tensor
    whole_of: Callable[[str], torch.Tensor]
    _writes: dict[int, list[tuple[int, StridedView]]] = field(default_factory=dict)
    _creations: dict[int, tuple[int, StridedView]] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _wholes: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, operation in enumerate(self.record.operations):
            for view in operation.written:
                self._writes.setdefault(view.memory, []).append((index, view))
            self._creations.update((view.memory, (index, view)) for view in operation.results if view is not None)
        self._names.update((view.memory, name) for name, view in self.record.begins.items())

    def pieces(self, name: str, part: Box, before: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield boxes that make up a part of a weight, in indices of the part, each with its initial values.

        `part` may be empty. `before` has the part's values before initialisation.
        """
        end, time = self.record.ends[name], len(self.record.operations)
        try:
            formula = self._formula(end, time, self.record.begins[name].memory)
        except _NotByPartsError:
            yield Box.whole(part.size), part.of(self._tensor(end, time))
        else:
            for piece in _cut(part):
                yield piece.seen_from(part), self._value(formula, piece, piece.seen_from(part).of(before))
        self._wholes.clear()

    def _formula(self, view: StridedView, time: int, root: int) -> _Formula:
        """Return the formula of the tensor `view` as it is before operation number `time`.

        `root` is the number of the memory that the weight has before initialisation.

        Raises:
            _NotByPartsError: the tensor cannot be computed part by part.
        """
        memory = view.memory
        if not view.is_in_order(self.record.numels[memory]):
            raise _NotByPartsError
        writes, is_filled = self._relevant(memory, time)
        first = _Before(view.dtype, True) if is_filled else self._first(view, root)
        found = tuple(self._write(index, written, view, root) for index, written in writes)
        return _BoxedValue(first, found) if found else first

    def _first(self, view: StridedView, root: int) -> _Formula:
        """Return the formula of a tensor's value before the first write to its memory."""
        if view.memory == root:
            return _Before(view.dtype, False)
        index, created = self._creations.get(view.memory, (0, None))
        if created is None or created.shape != view.shape or created.dtype != view.dtype:
            raise _NotByPartsError
        operation = self.record.operations[index]
        if operation.name == _RANDOM:
            return _Drawn(operation)
        if operation.name in _EMPTY:
            return _Before(view.dtype, True)
        return self._apply(operation, index, view, root)

    def _write(
        self, index: int, written: StridedView, view: StridedView, root: int
    ) -> tuple[Box, tuple[int, ...], _Applied]:
        found = written.box_in(view.shape) if written.dtype == view.dtype else None
        if found is None:
            raise _NotByPartsError
        return *found, self._apply(self.record.operations[index], index, written, root)

    def _apply(self, operation: Operation, index: int, result: StridedView, root: int) -> _Applied:
        """Return the formula of the result of operation number `index`; `_NotByPartsError` unless it is elementwise."""
        given = [item for item in operation.args if isinstance(item, StridedView)]
        leaves = pytree.tree_leaves((operation.args, dict(operation.kwargs)))
        is_plain = len(given) == sum(isinstance(leaf, StridedView) for leaf in leaves)
        if not (operation.is_elementwise and is_plain and len(operation.written) <= 1):
            raise _NotByPartsError
        return _Applied(operation, tuple(self._operand(item, index, operation, result, root) for item in given))

    def _operand(
        self, item: StridedView, index: int, operation: Operation, result: StridedView, root: int
    ) -> _Formula | torch.Tensor | None:
        if operation.written and item is operation.args[0]:
            return None
        if prod(item.shape) == 1:
            return self._tensor(item, index).reshape(())
        if item.shape != result.shape:
            raise _NotByPartsError
        return self._formula(item, index, root)

    def _relevant(self, memory: int, time: int) -> tuple[list[tuple[int, StridedView]], bool]:
        """Return the writes to a memory before operation number `time`, except those that a later write replaces.

        Each write is the number of its operation and the written view. The second result says whether the first of
        these writes fills the whole memory.
        """
        writes = [(index, view) for index, view in self._writes.get(memory, ()) if index < time]
        for number in range(len(writes) - 1, -1, -1):
            index, view = writes[number]
            if self.record.operations[index].overwrites and view.has_all(self.record.numels[memory]):
                return writes[number:], True
        return writes, False

    def _value(self, formula: _Formula, box: Box, before: torch.Tensor) -> torch.Tensor:
        """Return the values of a formula in a box, in new memory.

        `before` is the same box of the weight before initialisation.
        """
        match formula:
            case _Drawn(operation):
                distribution, parameters, site, *_, shape = operation.args[1:]
                given = distribution, parameters, site, list(box.size), list(box.start), shape
                return operation.target(self.seed, *given, **operation.kwargs)
            case _Before(dtype, is_empty):
                return torch.empty(box.size, dtype=dtype, device=self.seed.device) if is_empty else before.clone()
            case _Applied():
                return self._call(formula, None, box, before)
            case _BoxedValue(first, writes):
                value = self._value(first, box, before)
                for target, dims, applied in writes:
                    met = target.meet(box)
                    if met.numel:
                        tensor = _in_dims(met.seen_from(box).of(value), dims)
                        self._call(applied, tensor, met.seen_from(target).in_dims(dims), before)
                return value

    def _call(self, applied: _Applied, written: torch.Tensor | None, box: Box, before: torch.Tensor) -> torch.Tensor:
        """Run an elementwise operation on a box, and return its result.

        `written` is the tensor that it writes, or None. `before` is the box of the weight before initialisation.
        """

        def value_of(operand: _Formula | torch.Tensor | None) -> torch.Tensor | None:
            if operand is None:
                return written
            return operand if isinstance(operand, torch.Tensor) else self._value(operand, box, before)

        values = iter([value_of(operand) for operand in applied.operands])
        args = [next(values) if isinstance(item, StridedView) else item for item in applied.operation.args]
        return applied.operation.target(*args, **applied.operation.kwargs)

    def _tensor(self, view: StridedView, time: int) -> torch.Tensor:
        return _at(view, self._memory(view.memory, time))

    def _memory(self, memory: int, time: int) -> torch.Tensor:
        """Return the content of memory number `memory`, as a flat tensor, just before operation number `time`."""
        writes, is_filled = self._relevant(memory, time)
        count = sum(index < time for index, _ in self._writes.get(memory, ()))
        if (memory, count) in self._wholes:
            return self._wholes[memory, count]
        if is_filled:
            dtype = writes[0][1].dtype
            flat = torch.empty(self.record.numels[memory], dtype=dtype, device=self.seed.device)
        else:
            flat = self._before_first_write(memory, is_written=bool(writes))
        for index, _ in writes:
            self._run(self.record.operations[index], index, {memory: flat})
        self._wholes[memory, count] = flat
        return flat

    def _before_first_write(self, memory: int, *, is_written: bool) -> torch.Tensor:
        """Return the content of memory number `memory`, as a flat tensor, before any write; a copy if `is_written`."""
        if memory in self._creations:
            if (memory, 0) not in self._wholes:
                self._run_creating(self._creations[memory][0])
            found = self._wholes[memory, 0]
        elif memory == self.record.seed:
            return self.seed.reshape(1)
        elif memory in self._names:
            found = self.whole_of(self._names[memory]).contiguous().view(-1)
        else:
            found = self.record.constants[memory]
        return found.clone() if is_written else found

    def _run_creating(self, index: int) -> None:
        """Run operation number `index`, which creates memories, and keep the values of these in `_wholes`."""
        operation = self.record.operations[index]
        if operation.name == _RANDOM:
            (view,) = operation.results
            assert view is not None, "drawn numbers have memory of their own"
            whole = torch.empty(view.shape, dtype=view.dtype, device=self.seed.device)
            for piece in _cut(Box.whole(view.shape)):
                piece.of(whole).copy_(self._value(_Drawn(operation), piece, whole))
            self._wholes[view.memory, 0] = whole.view(-1)
            return
        made = [leaf for leaf in pytree.tree_leaves(self._run(operation, index, {})) if isinstance(leaf, torch.Tensor)]
        for view, value in zip(operation.results, made, strict=True):
            if view is not None:
                flat = torch.empty(self.record.numels[view.memory], dtype=view.dtype, device=value.device)
                _at(view, flat).copy_(value)
                self._wholes[view.memory, 0] = flat

    def _run(self, operation: Operation, index: int, own: dict[int, torch.Tensor]) -> Any:
        """Run operation number `index` on whole tensors, and return its result.

        `own` maps numbers of memories to flat tensors, which the operation may write. It writes to copies of all other
        memories.
        """

        def tensor_of(view: StridedView) -> torch.Tensor:
            if view.memory in own:
                return _at(view, own[view.memory])
            if any(view.memory == written.memory for written in operation.written):
                return _at(view, self._memory(view.memory, index).clone())
            return self._tensor(view, index)

        args, kwargs = pytree.tree_map_only(StridedView, tensor_of, (operation.args, dict(operation.kwargs)))
        return operation.target(*args, **kwargs)


def _at(view: StridedView, flat: torch.Tensor) -> torch.Tensor:
    typed = flat if flat.dtype == view.dtype else flat.view(view.dtype)
    return typed.as_strided(view.shape, view.stride, view.offset)


def _in_dims(tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor with only the dims `dims`. Its other dims have size 1."""
    for dim in reversed(range(tensor.dim())):
        tensor = tensor if dim in dims else tensor.select(dim, 0)
    return tensor


def _cut(box: Box) -> Iterator[Box]:
    """Yield boxes of at most `_AT_ONCE` elements that make up a box, in order. An empty box is yielded as it is."""
    if box.numel <= _AT_ONCE:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.size) if size > 1)
    step = max(1, _AT_ONCE * box.size[dim] // box.numel)
    for first in range(0, box.size[dim], step):
        size = min(step, box.size[dim] - first)
        start = (*box.start[:dim], box.start[dim] + first, *box.start[dim + 1 :])
        yield from _cut(Box(start, (*box.size[:dim], size, *box.size[dim + 1 :])))
