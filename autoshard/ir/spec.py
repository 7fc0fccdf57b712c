"""Partition specs: the layout of one tensor on a mesh.

A spec names the mesh axes that split each dim of a tensor, major to minor, and the axes over which the tensor is
*partial*. Over a partial axis each rank holds an addend, and the value is their reduction. Ranks along all other axes
hold copies.

An axis of size `a` splits a dim of size `n` into chunks of `ceil(n / a)` elements. Full chunks come first, then a
smaller chunk, then empty chunks, like those of `torch.chunk` and DTensor. Several axes on one dim nest this split.
Inside a program each rank holds the padded chunk, so local shapes are equal on all ranks. Values in the padding are
undefined.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from autoshard.errors import InvalidSpecError
from autoshard.ir.mesh import Mesh


class Reduction(StrEnum):
    """The operator that combines the addends of a partial value."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    PRODUCT = "product"


DimAxes = str | Sequence[str] | None


@dataclass(frozen=True, slots=True, init=False)
class PartitionSpec:
    """Layout of a tensor over the axes of a mesh. `autoshard.P` is a short name of `PartitionSpec`.

    A value is partial over an axis if each rank along the axis holds one term of a reduction, such as an addend. The
    reduction of all terms is the value. Ranks along an axis that the spec does not name hold copies.

    Args:
        *dims: for each dim, the axis that splits the dim, a tuple of axes in row-major order, or None for a whole dim.
            Missing trailing dims are whole.
        partial: for each axis over which the value is partial, the reduction ("sum", "max", "min" or "product").
            Default: none.

    Raises:
        InvalidSpecError: an axis is used twice, a name is not an identifier, or a reduction is unknown.

    Example:
        >>> P("data", None, ("model", "expert"))
        P('data', None, ('model', 'expert'))
        >>> P(partial={"model": "sum"}).is_partial
        True
        >>> P("data") == P("data", None)
        True
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, Reduction], ...]

    def __init__(self, *dims: DimAxes, partial: Mapping[str, str] | None = None) -> None:
        normal = [_dim_axes(dim) for dim in dims]
        while normal and not normal[-1]:
            normal.pop()
        object.__setattr__(self, "dims", tuple(normal))
        object.__setattr__(self, "partial", _partial_items(partial or {}))
        self._check_axes_used_once()

    def _check_axes_used_once(self) -> None:
        seen: set[str] = set()
        for axis in (*(axis for dim in self.dims for axis in dim), *(axis for axis, _ in self.partial)):
            if axis in seen:
                raise InvalidSpecError(
                    f"{self!r} uses mesh axis {axis!r} twice; an axis may split at most one dim, or be partial."
                )
            seen.add(axis)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the spec names: those that split a dim, then those over which the value is partial."""
        return (*self.sharded_axes, *(axis for axis, _ in self.partial))

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """The axes that split a dim, in the order of the dims."""
        return tuple(axis for dim in self.dims for axis in dim)

    @property
    def is_partial(self) -> bool:
        """Whether the value is partial over some axis: each rank along the axis holds one term of a reduction."""
        return bool(self.partial)

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every rank holds the whole value. No axis splits a dim, and the value is partial over no axis."""
        return not self.dims and not self.partial

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """Return the axes that split `dim` (counted from 0), in row-major order; empty if no axis splits `dim`."""
        return self.dims[dim] if dim < len(self.dims) else ()

    def dim_of(self, axis: str) -> int | None:
        """Return the dim that `axis` splits; None if `axis` splits no dim."""
        for dim, axes in enumerate(self.dims):
            if axis in axes:
                return dim
        return None

    def reduction_over(self, axis: str) -> Reduction | None:
        """Return the reduction for which the value is partial over `axis`; None if it is not partial over `axis`."""
        return dict(self.partial).get(axis)

    def check(self, mesh: Mesh, ndim: int) -> None:
        """Raise `InvalidSpecError` unless the spec fits a tensor of `ndim` dims on `mesh`."""
        for axis in self.axes:
            if axis not in mesh.axis_names:
                raise InvalidSpecError(
                    f"{self!r} names mesh axis {axis!r}, which {mesh} does not have; "
                    f"its axes are {', '.join(map(repr, mesh.axis_names))}."
                )
        if len(self.dims) > ndim:
            raise InvalidSpecError(f"{self!r} splits {len(self.dims)} dims, but the tensor has ndim={ndim}.")

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of each rank's local tensor, for a tensor of global `shape`.

        The shape includes padding, so it is equal on all ranks: an axis of size a turns a dim n into `ceil(n / a)`.
        """
        return tuple(self._local_size(dim, size, mesh) for dim, size in enumerate(shape))

    def _local_size(self, dim: int, size: int, mesh: Mesh) -> int:
        for axis in self.axes_of(dim):
            size = -(-size // mesh.axis_size(axis))
        return size

    def is_even(self, shape: Sequence[int], mesh: Mesh) -> bool:
        """Whether the spec splits a tensor of global `shape` into pieces of equal size, so no rank holds padding."""
        return all(size % mesh.shards(self.axes_of(dim)) == 0 for dim, size in enumerate(shape))

    def to_placements(self, mesh: Mesh) -> tuple[Placement, ...]:
        """Return the torch DTensor placements, one for each axis of `mesh`, in mesh order.

        Raises:
            InvalidSpecError: the mesh lacks an axis of the spec. Also raised if a dim lists its axes out of mesh order,
                which placements cannot express. List them in mesh order.
        """
        self.check(mesh, len(self.dims))
        self._check_mesh_order(mesh)
        return tuple(self._placement(axis) for axis in mesh.axis_names)

    def _placement(self, axis: str) -> Placement:
        dim, reduction = self.dim_of(axis), self.reduction_over(axis)
        if dim is not None:
            return Shard(dim)
        return Replicate() if reduction is None else Partial(reduction.value)

    def _check_mesh_order(self, mesh: Mesh) -> None:
        order = {axis: index for index, axis in enumerate(mesh.axis_names)}
        for axes in self.dims:
            if list(axes) != sorted(axes, key=order.__getitem__):
                raise InvalidSpecError(
                    f"{self!r} splits one dim in an order other than {mesh}'s; torch placements cannot "
                    "express this. Name the axes in the order of the mesh."
                )

    @classmethod
    def from_placements(cls, placements: Sequence[Placement], mesh: Mesh) -> PartitionSpec:
        """Return the spec of DTensor `placements`, one for each axis of `mesh`, in mesh order.

        Raises `InvalidSpecError` for a wrong number of placements, or for a placement other than `Shard`, `Replicate`
        and `Partial`.
        """
        if len(placements) != len(mesh.axes):
            raise InvalidSpecError(f"There are {len(placements)} placements for the {len(mesh.axes)} axes of {mesh}.")
        dims: dict[int, list[str]] = {}
        partial: dict[str, str] = {}
        for axis, placement in zip(mesh.axis_names, placements, strict=True):
            if isinstance(placement, Shard):
                dims.setdefault(placement.dim, []).append(axis)
            elif type(placement) is Partial:
                partial[axis] = placement.reduce_op
            elif not isinstance(placement, Replicate):
                raise InvalidSpecError(
                    f"A DTensor has {placement!r} on mesh axis {axis!r}, which no spec describes. Redistribute the "
                    "DTensor to Shard, Replicate or Partial first."
                )
        return cls(*(dims.get(dim) for dim in range(max(dims, default=-1) + 1)), partial=partial)

    @classmethod
    def parse(cls, text: str) -> PartitionSpec:
        """Read a spec from `text`, as printed by `repr`: `P('data', None, partial={'model': 'sum'})`.

        Raises `InvalidSpecError` for any other text.
        """
        if len(text) > _MAX_TEXT:
            raise InvalidSpecError(f"spec={text[:40]!r}... has {len(text)} characters; write at most {_MAX_TEXT}.")
        try:
            call = ast.parse(text, mode="eval").body
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "P":
                raise ValueError("not a call of P")
            dims = [ast.literal_eval(argument) for argument in call.args]
            keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
            return cls(*dims, **keywords)
        except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
            raise InvalidSpecError(
                f"spec={text!r} cannot be read; write it as P('data', None) or P('data', partial={{'model': 'sum'}})."
            ) from error

    def __repr__(self) -> str:
        parts = [repr(_plain(dim)) for dim in self.dims]
        if self.partial:
            parts.append(f"partial={ {axis: reduction.value for axis, reduction in self.partial} }")
        return f"P({', '.join(parts)})"


P = PartitionSpec

_MAX_TEXT = 10_000
"""Most characters of a spec's text. Python's parser is slow on longer nested text."""


def _dim_axes(dim: DimAxes) -> tuple[str, ...]:
    if dim is None:
        return ()
    axes = (dim,) if isinstance(dim, str) or not isinstance(dim, Iterable) else tuple(dim)
    if isinstance(dim, Set) or not all(map(_is_axis, axes)):  # the order of a set differs between processes
        raise InvalidSpecError(f"P(...) was given dim={dim!r}; a dim is an axis name, a tuple of them, or None.")
    return axes


def _is_axis(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier()


def _partial_items(partial: Mapping[str, str]) -> tuple[tuple[str, Reduction], ...]:
    known: Iterable[str] = [reduction.value for reduction in Reduction]
    if not isinstance(partial, Mapping):
        raise InvalidSpecError(f"P(...) was given partial={partial!r}; write partial={{'data': 'sum'}}.")
    for axis, reduction in partial.items():
        if not _is_axis(axis):
            raise InvalidSpecError(f"P(partial={partial!r}) names axis {axis!r}; an axis is a name such as 'data'.")
        if reduction not in known:
            raise InvalidSpecError(
                f"P(partial={{{axis!r}: {reduction!r}}}) has an unknown reduction; use one of {', '.join(known)}."
            )
    return tuple(sorted((axis, Reduction(reduction)) for axis, reduction in partial.items()))


def _plain(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else axes
