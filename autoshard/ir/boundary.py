"""Conversion between global tensors and the local tensors that ranks pass to a program.

Inside a program ranks hold padded pieces (`autoshard.ir.spec`); DTensor holds unpadded chunks. DTensor's chunk equals
the piece without padding, unless several axes split one dim unevenly. For example, 2 x 2 ranks split nine elements into
pieces of 3, 2, 3 and 1. DTensor's chunks are 3, 2, 2 and 2. `matches_dtensor` tells the cases apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from autoshard.errors import AutoshardError, InvalidSpecError
from autoshard.ir.mesh import Mesh
from autoshard.ir.reduction import combine, identity_of
from autoshard.ir.spec import PartitionSpec, Reduction


def shard(tensor: Tensor, spec: PartitionSpec, mesh: Mesh, rank: int, *, padding: float | int | bool = 0) -> Tensor:
    """Return the padded local tensor of `rank` for a global `tensor`.

    Over a partial axis the first rank gets the value, and all other ranks get the reduction's identity.

    Args:
        padding: fill value of the padding, 0 by default. NaN reveals programs that read padding.

    Returns:
        A contiguous tensor of shape `spec.local_shape(tensor.shape, mesh)`. It may be `tensor` or share its memory.

    Raises:
        InvalidSpecError: `spec` does not fit the tensor or the mesh.
    """
    spec.check(mesh, tensor.dim())
    place = mesh.coordinates(rank)
    for axis, reduction in spec.partial:
        if place[axis] != 0:
            tensor = torch.full_like(tensor, identity_of(reduction, tensor.dtype))
    for dim in range(len(spec.dims)):
        for axis in spec.axes_of(dim):
            tensor = _piece(tensor, dim, mesh.axis_size(axis), place[axis], padding)
    return tensor.contiguous()


def shard_all(tensor: Tensor, spec: PartitionSpec, mesh: Mesh, *, padding: float | int | bool = 0) -> list[Tensor]:
    """Return the padded local tensors of all ranks, in rank order, for a global `tensor`.

    Ranks with equal copies share one tensor object.
    """

    @cache
    def at(key: tuple[int, ...]) -> Tensor:
        rank = mesh.rank_at({**origin, **dict(zip(axes, key, strict=True))})
        return shard(tensor, spec, mesh, rank, padding=padding)

    axes = spec.axes
    spec.check(mesh, tensor.dim())
    origin = dict.fromkeys(mesh.axis_names, 0)
    places = map(mesh.coordinates, range(mesh.size))
    return [at(tuple(place[axis] for axis in axes)) for place in places]


def unshard(
    locals_: Sequence[Tensor], spec: PartitionSpec, mesh: Mesh, shape: Sequence[int], *, check: bool = False
) -> Tensor:
    """Return the global tensor of `shape`, put together from the padded local tensors of all ranks, in rank order.

    Args:
        check: compare the copies on all ranks, instead of taking the first rank's copy.

    Raises:
        InvalidSpecError: `spec` does not fit the shape or the mesh, or a local tensor has another shape.
        AutoshardError: with `check`, ranks that should hold copies differ.
    """
    spec.check(mesh, len(shape))
    _check_locals(locals_, spec, mesh, tuple(shape))
    value_at = _assembler(locals_, spec, mesh, tuple(shape))
    value = value_at(0, 0).contiguous()
    if check:
        for rank in range(1, mesh.size):
            _check_copy(value, value_at(rank, 0), spec, mesh, rank)
    return value


def matches_dtensor(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> bool:
    """Whether DTensor splits a tensor of global `shape` into the same pieces as `spec`, apart from padding.

    False if several axes split a dim in another order than the mesh's, which placements cannot express.

    Example:
        >>> from autoshard.ir.spec import P
        >>> mesh = Mesh({"data": 2, "model": 2})
        >>> [matches_dtensor(P(("data", "model")), (size,), mesh) for size in (7, 8, 9)]
        [True, True, False]
    """
    order = {axis: index for index, axis in enumerate(mesh.axis_names)}
    if any(list(axes) != sorted(axes, key=order.__getitem__) for axes in spec.dims):
        return False
    return all(_dim_matches(size, spec.axes_of(dim), mesh) for dim, size in enumerate(shape))


def pad_local(chunk: Tensor, spec: PartitionSpec, mesh: Mesh, shape: Sequence[int]) -> Tensor:
    """Return the local tensor, padded with zeros, for DTensor's `chunk` of a value of global `shape`.

    Raises `InvalidSpecError` if DTensor splits the value into other pieces than `spec`. `unpad_local` is the inverse.
    """
    _check_matches(spec, mesh, shape)
    local = spec.local_shape(shape, mesh)
    if tuple(chunk.shape) == local:
        return chunk
    result = chunk.new_zeros(local)
    result[tuple(slice(0, size) for size in chunk.shape)] = chunk
    return result


def unpad_local(local: Tensor, spec: PartitionSpec, mesh: Mesh, shape: Sequence[int], rank: int) -> Tensor:
    """Return DTensor's contiguous chunk for the padded `local` tensor of `rank`, part of a value of global `shape`.

    Raises `InvalidSpecError` if DTensor splits the value into other pieces than `spec`. `pad_local` is the inverse.
    """
    _check_matches(spec, mesh, shape)
    for dim, size in enumerate(unpadded_shape(spec, mesh, shape, rank)):
        local = local.narrow(dim, 0, size)
    return local.contiguous()


def unpadded_shape(spec: PartitionSpec, mesh: Mesh, shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the shape of `rank`'s piece, without padding, of a tensor of global `shape`."""
    place = mesh.coordinates(rank)
    return tuple(_real_size(size, spec.axes_of(dim), mesh, place) for dim, size in enumerate(shape))


def _piece(tensor: Tensor, dim: int, pieces: int, index: int, padding: float | int | bool) -> Tensor:
    size = -(-tensor.shape[dim] // pieces)
    start = min(index * size, tensor.shape[dim])
    piece = tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))
    if piece.shape[dim] == size:
        return piece
    rest = list(piece.shape)
    rest[dim] = size - piece.shape[dim]
    return torch.cat([piece, piece.new_full(rest, padding)], dim)


@dataclass(frozen=True, slots=True)
class _Level:
    """One axis of a spec, for `unshard` to remove: by a reduction over a partial axis, or by joining a dim's pieces.

    The joined dim `dim` is cut to `size` elements. `reduction` is None for an axis that splits a dim.
    """

    axis: str
    reduction: Reduction | None = None
    dim: int = 0
    size: int = 0

    def undo(self, members: Sequence[Tensor]) -> Tensor:
        if self.reduction is not None:
            return combine(self.reduction, members)
        return torch.cat(list(members), self.dim).narrow(self.dim, 0, self.size)


def _levels(spec: PartitionSpec, mesh: Mesh, shape: Sequence[int]) -> list[_Level]:
    """Return a level for each axis of `spec`: first the axes that split dims, major to minor, then the partial axes.

    `unshard` removes the axes from last to first.
    """
    levels = []
    for dim, size in enumerate(shape):
        for axis in spec.axes_of(dim):
            levels.append(_Level(axis, dim=dim, size=size))
            size = -(-size // mesh.axis_size(axis))
    return [*levels, *(_Level(axis, reduction) for axis, reduction in spec.partial)]


def _assembler(
    locals_: Sequence[Tensor], spec: PartitionSpec, mesh: Mesh, shape: Sequence[int]
) -> Callable[[int, int], Tensor]:
    """Return `value_at(rank, depth)`: the tensor on `rank` when only the first `depth` levels are still sharded.

    `value_at(rank, 0)` is the global tensor.
    """
    levels = _levels(spec, mesh, shape)
    groups = [{rank: group for group in mesh.groups(level.axis) for rank in group} for level in levels]

    joined: dict[tuple[int, ...], Tensor] = {}

    @cache
    def join(group: tuple[int, ...], depth: int) -> Tensor:
        members = [value_at(rank, depth + 1) for rank in group]
        key = (depth, *map(id, members))  # groups with copies of the same tensors are joined once
        if key not in joined:
            joined[key] = levels[depth].undo(members)
        return joined[key]

    def value_at(rank: int, depth: int) -> Tensor:
        return locals_[rank] if depth == len(levels) else join(groups[depth][rank], depth)

    return value_at


def _check_locals(locals_: Sequence[Tensor], spec: PartitionSpec, mesh: Mesh, shape: Sequence[int]) -> None:
    expected = spec.local_shape(shape, mesh)
    if len(locals_) != mesh.size:
        raise InvalidSpecError(f"{mesh} has {mesh.size} ranks, found {len(locals_)} local tensors.")
    for rank, local in enumerate(locals_):
        if tuple(local.shape) != expected:
            raise InvalidSpecError(
                f"rank {rank} holds shape={tuple(local.shape)} of a tensor of shape {tuple(shape)}; "
                f"{spec!r} on {mesh} needs {expected}."
            )


def _check_copy(value: Tensor, copy: Tensor, spec: PartitionSpec, mesh: Mesh, rank: int) -> None:
    if copy is value or _are_equal(copy, value):
        return
    differ = (copy != value) & ~((copy != copy) & (value != value))
    if bool(differ.any()):
        raise AutoshardError(
            f"rank {rank} at {mesh.coordinates(rank)} of {mesh} differs from rank 0 in "
            f"{int(differ.sum())} of {value.numel()} elements with spec {spec!r}; copies must agree."
        )


def _are_equal(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal in all elements; complex32, unknown to `torch.equal`, is compared as pairs."""
    if left.dtype == torch.complex32:
        left, right = (torch.view_as_real(value.resolve_conj()) for value in (left, right))
    return torch.equal(left, right)


def _check_matches(spec: PartitionSpec, mesh: Mesh, shape: Sequence[int]) -> None:
    if not matches_dtensor(spec, shape, mesh):
        raise InvalidSpecError(
            f"{spec!r} cuts shape={tuple(shape)} on {mesh} into other pieces than DTensor does; split each "
            "dim by one axis, evenly, or by axes in the mesh's order."
        )


def _real_size(size: int, axes: Sequence[str], mesh: Mesh, place: Mapping[str, int]) -> int:
    """Return the number of elements without padding that a rank holds of a dim of `size` elements, split by `axes`.

    `place` has the rank's index along each axis.
    """
    real = size
    for axis in axes:
        size = -(-size // mesh.axis_size(axis))
        real = min(max(real - place[axis] * size, 0), size)
    return real


def _chunk_size(size: int, axes: Sequence[str], mesh: Mesh, place: Mapping[str, int]) -> int:
    """Return the number of elements in a rank's DTensor chunk of a dim of `size` elements, split by `axes`.

    Each axis in turn cuts the unpadded size into chunks. `place` has the rank's index along each axis.
    """
    for axis in axes:
        full = -(-size // mesh.axis_size(axis))
        size = min(max(size - place[axis] * full, 0), full)
    return size


def _dim_matches(size: int, axes: Sequence[str], mesh: Mesh) -> bool:
    if size % mesh.shards(axes) == 0 or len(axes) == 1:
        return True
    indices = product(*(range(mesh.axis_size(axis)) for axis in axes))
    places = (dict(zip(axes, index, strict=True)) for index in indices)
    return all(_real_size(size, axes, mesh, place) == _chunk_size(size, axes, mesh, place) for place in places)
