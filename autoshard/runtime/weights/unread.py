"""Tensors that are read only when needed, and only the needed region.

Functions that only move values (`torch.cat`, `stack`, `chunk`, `split`, `transpose`, ...) map an `Unread` to another
`Unread`, whose regions consist of regions of the first. So a library's code that makes a model's tensors from files'
tensors can run before any value is read. Any other function runs on whole operands when its result is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.errors import WeightsError

Region = tuple[slice, ...]
"""A slice of each dim, with a start and a stop, and a step of 1."""

Read = Callable[[Region], torch.Tensor]
"""Function that returns the values of a region of one tensor."""


def whole_region(shape: Sequence[int]) -> Region:
    """Return the region that covers a whole tensor of this shape."""
    return tuple(slice(0, size) for size in shape)


def blocks_of(shape: Sequence[int], itemsize: int, most_bytes: int) -> Iterator[Region]:
    """Yield regions of at most `most_bytes` each that make up a tensor of this shape, in row-major order.

    `itemsize` is the bytes of an element.

    Example:
        >>> list(blocks_of((3, 2), 4, 16))
        [(slice(0, 2, None), slice(0, 2, None)), (slice(2, 3, None), slice(0, 2, None))]
    """
    size, row_bytes = (shape[0], math.prod(shape[1:]) * itemsize) if shape else (1, itemsize)
    if not shape or size * row_bytes <= most_bytes:
        yield whole_region(shape)
    elif row_bytes <= most_bytes or len(shape) == 1:
        rows = max(1, most_bytes // row_bytes)
        for start in range(0, size, rows):
            yield (slice(start, min(start + rows, size)), *whole_region(shape[1:]))
    else:
        for row in range(size):
            for rest in blocks_of(shape[1:], itemsize, most_bytes):
                yield (slice(row, row + 1), *rest)


def shape_of(region: Region) -> tuple[int, ...]:
    """Return the shape of a region: the size of each slice."""
    return tuple(part.stop - part.start for part in region)


class Unread:
    """A tensor of known shape and dtype whose values are not read yet. `read` returns the values of a region.

    Example:
        >>> whole = torch.arange(6.0).reshape(2, 3)
        >>> unread = torch.cat([Unread(whole.shape, whole.dtype, whole.__getitem__)] * 2)
        >>> tuple(unread.shape), unread.read((slice(1, 3), slice(0, 1)))
        ((4, 3), tensor([[3.],
                [0.]]))
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, read: Read) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._read = read

    def __repr__(self) -> str:
        return f"Unread(shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def read(self, region: Region | None = None) -> torch.Tensor:
        """Return the values of a region; None: of the whole tensor. They may share memory with their source."""
        return self._read(whole_region(self.shape) if region is None else region)

    def __getattr__(self, name: str) -> Any:
        """Return a method of `torch.Tensor` that acts on this unread tensor as a torch function does."""
        method = getattr(torch.Tensor, name) if not name.startswith("__") else None
        if not callable(method):
            raise AttributeError(f"a tensor that is not read yet has no {name!r}")
        return lambda *args, **kwargs: _call(method, (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Apply a torch function to unread tensors, and return an unread result."""
        return _call(function, args, kwargs or {})


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply a torch function to unread tensors, and return an unread result.

    If the function only moves values, reading a region of the result reads regions of operands, else whole operands.
    """
    moved = _MOVES.get(getattr(function, "__name__", ""), _computed_by(function))
    return moved(*args, **kwargs)


def _joined(parts: Sequence[Unread], dim: int = 0) -> Unread:
    dim %= len(parts[0].shape)
    shape = list(parts[0].shape)
    others = {(*part.shape[:dim], *part.shape[dim + 1 :], part.dtype) for part in parts}
    if len(others) > 1:
        raise WeightsError(f"{list(parts)} cannot be joined along dim {dim}: they differ in other dims, or in dtype.")
    sizes = [part.shape[dim] for part in parts]
    shape[dim] = sum(sizes)
    offsets = [0, *accumulate(sizes)]

    def read(region: Region) -> torch.Tensor:
        wanted = region[dim]
        pieces = []
        for part, offset, size in zip(parts, offsets, sizes, strict=False):
            start, stop = max(wanted.start - offset, 0), min(wanted.stop - offset, size)
            if start < stop:
                pieces.append(part.read(_with(region, dim, slice(start, stop))))
        if not pieces:
            return parts[0].read(_with(region, dim, slice(0, 0)))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    return Unread(shape, parts[0].dtype, read)


def _stacked(parts: Sequence[Unread], dim: int = 0) -> Unread:
    return _joined([_unsqueezed(part, dim) for part in parts], dim)


def _unsqueezed(tensor: Unread, dim: int) -> Unread:
    dim %= len(tensor.shape) + 1
    shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])

    def read(region: Region) -> torch.Tensor:
        values = tensor.read((*region[:dim], *region[dim + 1 :])).unsqueeze(dim)
        return values.narrow(dim, 0, region[dim].stop - region[dim].start)

    return Unread(shape, tensor.dtype, read)


def _squeezed(tensor: Unread, dim: int | None = None) -> Unread:
    """Return the tensor without dim `dim`, if its size is one; with None, without all dims of size one."""
    if dim is None:
        return reduce(_squeezed, range(len(tensor.shape) - 1, -1, -1), tensor)
    dim %= len(tensor.shape)
    if tensor.shape[dim] != 1:
        return tensor
    shape = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
    return Unread(
        shape,
        tensor.dtype,
        lambda region: tensor.read((*region[:dim], slice(0, 1), *region[dim:])).squeeze(dim),
    )


def _narrowed(tensor: Unread, dim: int, start: int, length: int) -> Unread:
    shape = list(tensor.shape)
    shape[dim] = length

    def read(region: Region) -> torch.Tensor:
        wanted = region[dim]
        return tensor.read(_with(region, dim, slice(wanted.start + start, wanted.stop + start)))

    return Unread(shape, tensor.dtype, read)


def _split(tensor: Unread, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Unread, ...]:
    dim %= len(tensor.shape)
    size, sizes = tensor.shape[dim], split_size_or_sections
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, size, sizes)]
    starts = [0, *accumulate(sizes)]
    return tuple(_narrowed(tensor, dim, start, length) for start, length in zip(starts, sizes, strict=False))


def _chunked(tensor: Unread, chunks: int, dim: int = 0) -> tuple[Unread, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _transposed(tensor: Unread, dim0: int, dim1: int) -> Unread:
    shape = _swapped(tensor.shape, dim0, dim1)

    def read(region: Region) -> torch.Tensor:
        return tensor.read(_swapped(region, dim0, dim1)).transpose(dim0, dim1)

    return Unread(shape, tensor.dtype, read)


def _same(tensor: Unread, *_: Any, **__: Any) -> Unread:
    """Return the tensor itself, for functions that leave values as they are."""
    return tensor


def _size(tensor: Unread, dim: int | None = None) -> Any:
    return tensor.shape if dim is None else tensor.shape[dim]


def _computed_by(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with unread results, which calls `function` on whole operands when a result is read.

    At the call, `function` runs once on the meta device, for the shapes and dtypes of its results.
    """

    def compute(*args: Any, **kwargs: Any) -> Any:
        known, tree = pytree.tree_flatten((args, kwargs))

        def run(make: Callable[[Unread], torch.Tensor]) -> Any:
            values = [make(item) if isinstance(item, Unread) else item for item in known]
            args, kwargs = pytree.tree_unflatten(values, tree)
            return function(*args, **kwargs)

        def late(index: int, like: torch.Tensor) -> Unread:
            def read(region: Region) -> torch.Tensor:
                return pytree.tree_leaves(run(Unread.read))[index][region]

            return Unread(like.shape, like.dtype, read)

        results, result_tree = pytree.tree_flatten(run(_outline))
        found = [late(*item) if isinstance(item[1], torch.Tensor) else item[1] for item in enumerate(results)]
        return pytree.tree_unflatten(found, result_tree)

    return compute


def _outline(tensor: Unread) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _with(region: Region, dim: int, part: slice) -> Region:
    return (*region[:dim], part, *region[dim + 1 :])


def _swapped(items: Sequence[Any], first: int, second: int) -> tuple[Any, ...]:
    swapped = list(items)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    return tuple(swapped)


_MOVES: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("cat", "concat", "concatenate"), _joined),
    "stack": _stacked,
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "split": _split,
    "chunk": _chunked,
    "transpose": _transposed,
    **dict.fromkeys(("contiguous", "clone", "detach", "cpu"), _same),
    "size": _size,
    "dim": lambda tensor: len(tensor.shape),
    "numel": lambda tensor: tensor.shape.numel(),
}
"""Name of a torch function that only moves values, or returns a shape → its version for unread tensors."""
