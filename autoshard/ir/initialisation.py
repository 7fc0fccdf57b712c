"""The record of a model's initialisers, from which any part of any weight can be computed alone.

A *memory* is the storage of tensors, known by a number. Tensors of the record are views of memories (`StridedView`), so
views need no operation. Random numbers come from `autoshard::random` by their global index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: its start and its size in each dim."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        """Return the box of all elements of a tensor of `shape`."""
        return Box((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return prod(self.size)

    def meet(self, other: Box) -> Box:
        """Return the intersection with `other`; a size is 0 if the boxes have no common element."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(s + n, o + m) for s, n, o, m in zip(self.start, self.size, other.start, other.size, strict=True))
        return Box(start, tuple(max(0, end - begin) for begin, end in zip(start, ends, strict=True)))

    def seen_from(self, other: Box) -> Box:
        """Return the same box with its start counted from the start of `other`."""
        return Box(tuple(s - o for s, o in zip(self.start, other.start, strict=True)), self.size)

    def in_dims(self, dims: tuple[int, ...]) -> Box:
        """Return the box with only the dims in `dims`, in their order."""
        return Box(tuple(self.start[dim] for dim in dims), tuple(self.size[dim] for dim in dims))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor inside the box, as a view."""
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor


@dataclass(frozen=True, slots=True)
class StridedView:
    """A tensor of the record: a view of the memory with number `memory`.

    Shape, stride and offset are counted in elements, as in torch.
    """

    memory: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def has_all(self, numel: int) -> bool:
        """Whether the view contains each of the `numel` elements of its memory once, in any order."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.offset == 0 and expected == numel

    def is_in_order(self, numel: int) -> bool:
        """Whether the view contains all `numel` elements of its memory, in contiguous order."""
        pairs = zip(self.shape, self.stride, contiguous_strides(self.shape), strict=True)
        return self.has_all(numel) and all(size == 1 or stride == expected for size, stride, expected in pairs)

    def box_in(self, shape: tuple[int, ...]) -> tuple[Box, tuple[int, ...]] | None:
        """Return the box that the view covers in a contiguous tensor of `shape`, and the tensor dim of each view dim.

        None if the view's elements do not form a box of the tensor.
        """
        strides = contiguous_strides(shape)
        start, left = [], self.offset
        for size, stride in zip(shape, strides, strict=True):
            start.append(left // stride if size > 1 else 0)
            left -= start[-1] * stride
        sizes, dims = [1] * len(shape), []
        for size, stride in zip(self.shape, self.stride, strict=True):
            behind = range(dims[-1] + 1 if dims else 0, len(shape))
            dim = next((dim for dim in behind if strides[dim] == stride and shape[dim] >= size), None)
            if dim is None:
                return None
            dims.append(dim)
            sizes[dim] = size
        fits = all(begin + size <= most for begin, size, most in zip(start, sizes, shape, strict=True))
        return (Box(tuple(start), tuple(sizes)), tuple(dims)) if fits and not left else None


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous torch tensor of `shape`."""
    result = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        result[dim] = result[dim + 1] * max(1, shape[dim + 1])
    return tuple(result)


@dataclass(frozen=True, slots=True)
class Operation:
    """A recorded call of the operator `target`, with a `StridedView` for each tensor among its arguments.

    Args:
        results: each tensor result, as a view; None for a result whose memory existed before the call.
        written: views that the call writes to.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[StridedView | None, ...]
    written: tuple[StridedView, ...]

    @property
    def name(self) -> str:
        """Name of the operator with its namespace: "aten::copy_"."""
        return self.target._schema.name

    @property
    def overwrites(self) -> bool:
        """Whether the written values are independent of the earlier content of `written`."""
        return self.name in _OVERWRITING or "out" in self.kwargs

    @property
    def is_elementwise(self) -> bool:
        """Whether each written element depends only on scalars and on elements at its own index."""
        return self.name in _OVERWRITING or torch.Tag.pointwise in self.target.tags

    @property
    def operands(self) -> tuple[StridedView, ...]:
        """Views among the arguments whose values the call reads, in order."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        skipped = self.written if self.overwrites else ()
        return tuple(
            leaf for leaf in leaves if isinstance(leaf, StridedView) and not any(leaf is item for item in skipped)
        )


_OVERWRITING = ("aten::copy_", "aten::fill_", "aten::zero_")


@dataclass(frozen=True, slots=True)
class Initialisation:
    """The record of a model's initialisers.

    Args:
        operations: the operations in the order of their calls.
        numels: number of elements of each memory, by the memory's number.
        begins: view of each parameter and buffer before initialisation, by name. Each is a whole memory, in contiguous
            order.
        ends: view of each parameter's and buffer's final value, by name.
        constants: flat values of each memory that existed before the record began, by the memory's number.
        seed: number of the memory that holds the seed.
    """

    operations: tuple[Operation, ...]
    numels: Mapping[int, int]
    begins: Mapping[str, StridedView]
    ends: Mapping[str, StridedView]
    constants: Mapping[int, torch.Tensor]
    seed: int

    def digest(self) -> str:
        """Return a hash, 16 hex digits, equal on ranks with equal initialisers."""
        text = [f"{op.target} {op.args} {dict(op.kwargs)} {op.results}" for op in self.operations]
        return hashlib.sha256("\n".join([*text, str(self.begins), str(self.ends)]).encode()).hexdigest()[:16]

    def sources(self) -> dict[str, frozenset[str]]:
        """Return for each weight the names of the weights whose values before initialisation determine its final value.

        A weight that no operation writes depends on itself.
        """
        known = {view.memory: _MemorySource(view.shape, frozenset({name})) for name, view in self.begins.items()}
        for operation in self.operations:
            read = frozenset().union(
                *(known[item.memory].sources for item in operation.operands if item.memory in known)
            )
            for view in operation.results:
                if view is not None:
                    known[view.memory] = _MemorySource(view.shape, read)
            for view in operation.written:
                content = known.setdefault(view.memory, _MemorySource(view.shape, frozenset()))
                known[view.memory] = content.written(view, read, self.numels[view.memory], operation.overwrites)
        return {name: known[view.memory].sources for name, view in self.ends.items()}


@dataclass(frozen=True, slots=True)
class _MemorySource:
    """The weights that determine the present values in one memory by their values before initialisation.

    Args:
        shape: shape of the tensor that first had the memory.
        sources: names of the weights on which some value in the memory depends.
        boxes: boxes overwritten since the last write of the whole memory, each with the weights on which its values
            depend.
        numel: number of elements of all boxes together.
    """

    shape: tuple[int, ...]
    sources: frozenset[str]
    boxes: tuple[tuple[Box, frozenset[str]], ...] = ()
    numel: int = 0

    def written(self, view: StridedView, read: frozenset[str], numel: int, overwrites: bool) -> _MemorySource:
        """Return the sources after a write to `view` in a memory of `numel` elements.

        The written values depend on the weights `read`, and unless `overwrites`, on the earlier content of `view`.
        """
        if overwrites and view.has_all(numel):
            return _MemorySource(self.shape, read)
        found = view.box_in(self.shape) if overwrites else None
        if found is None:
            return replace(self, sources=self.sources | read)
        boxes, written = (*self.boxes, (found[0], read)), self.numel + found[0].numel
        if written >= prod(self.shape) and cover([box for box, _ in boxes], self.shape):
            return _MemorySource(self.shape, frozenset().union(*(sources for _, sources in boxes)))
        return _MemorySource(self.shape, self.sources | read, boxes, written)


def cover(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether the boxes together contain every element of a tensor of `shape`."""
    if sum(box.numel for box in boxes) < prod(shape):
        return False
    marks = [
        sorted({0, size, *(end for box in boxes for end in (box.start[dim], box.start[dim] + box.size[dim]))})
        for dim, size in enumerate(shape)
    ]
    places = [{mark: place for place, mark in enumerate(each)} for each in marks]
    is_covered = np.zeros([len(each) - 1 for each in marks], dtype=bool)  # the cells between marks
    for box in boxes:
        ends = zip(places, box.start, box.size, strict=True)
        is_covered[tuple(slice(at[start], at[start + size]) for at, start, size in ends)] = True
    return bool(is_covered.all())
