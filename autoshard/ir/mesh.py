"""Meshes: named axes over which tensors are split.

A mesh is abstract: it has axis names and sizes, and no devices. Ranks are numbered row-major with the last axis
fastest, like those of `torch.distributed.DeviceMesh`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from autoshard.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


MAX_RANKS = 2**20
"""Largest number of ranks of a mesh: ten times the largest cluster that trained a model, and few enough to list."""


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """Named axes and their sizes. Ranks are numbered in row-major order, so the last axis varies fastest.

    Args:
        axes: axis name to size (at least 1), in order, e.g. `{"data": 2, "model": 4}`.

    Raises:
        MeshError: there is no axis, a name is not a Python identifier, a size is below 1, or the mesh has more than
            2**20 ranks.

    Example:
        >>> mesh = Mesh({"data": 2, "model": 4})
        >>> mesh.size, mesh.coordinates(6)
        (8, {'data': 1, 'model': 2})
        >>> mesh.groups("data")[1]
        (1, 5)
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, axes: Mapping[str, int]) -> None:
        if not isinstance(axes, Mapping):
            raise MeshError(f"Mesh({axes!r}): a {type(axes).__name__} names no axes; write Mesh({{'data': 2}}).")
        if not axes:
            raise MeshError("Mesh({}) has no axis; give at least one, e.g. Mesh({'data': 2}).")
        for name, size in axes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"Mesh axis name {name!r} must be a Python identifier, e.g. 'data'.")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"Mesh axis {name!r} has size={size!r}; a size is an integer of at least 1.")
        if (ranks := math.prod(axes.values())) > MAX_RANKS:
            raise MeshError(f"Mesh({dict(axes)!r}) has {ranks} ranks; the largest mesh has {MAX_RANKS}.")
        object.__setattr__(self, "axes", tuple(axes.items()))

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Mesh:
        """Return a mesh with the named dims of a torch `DeviceMesh`. Raises `MeshError` if the dims have no names."""
        names = device_mesh.mesh_dim_names
        if names is None:
            raise MeshError(
                f"DeviceMesh of shape {tuple(device_mesh.shape)} has no mesh_dim_names; "
                "pass mesh_dim_names=('data', ...) to init_device_mesh."
            )
        return cls(dict(zip(names, device_mesh.shape, strict=True)))

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes, in row-major order."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes, in row-major order."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """The number of ranks of the mesh."""
        return math.prod(self.shape)

    def axis_size(self, axis: str) -> int:
        """Return the number of ranks along `axis`. Raises `MeshError` for an unknown axis."""
        for name, size in self.axes:
            if name == axis:
                return size
        raise MeshError(f"{self} has no axis {axis!r}; its axes are {', '.join(map(repr, self.axis_names))}.")

    def shards(self, axes: Sequence[str]) -> int:
        """Return the number of pieces into which `axes` together split a dim, the product of their sizes."""
        return math.prod(self.axis_size(axis) for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` along each axis, by axis name. Raises `MeshError` for an unknown rank."""
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise MeshError(f"{self} has ranks 0 to {self.size - 1}; rank={rank!r} is not among them.")
        result = {}
        for name, size in reversed(self.axes):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name in self.axis_names}

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at `coordinates` (axis name to index). Raises `MeshError` if there is no such rank."""
        rank = 0
        for name, size in self.axes:
            index = coordinates.get(name)
            if not isinstance(index, int) or not 0 <= index < size:
                raise MeshError(f"{self} has no rank at {dict(coordinates)}; {name!r} goes from 0 to {size - 1}.")
            rank = rank * size + index
        for axis in coordinates:
            self.axis_size(axis)
        return rank

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks whose coordinates differ only along `axes`.

        Within a group, ranks are in row-major order over `axes` as given. Raises `MeshError` for an unknown axis.
        """
        for axis in axes:
            self.axis_size(axis)
        others = [name for name in self.axis_names if name not in axes]
        result = []
        for fixed in product(*(range(self.axis_size(name)) for name in others)):
            base = dict(zip(others, fixed, strict=True))
            inner = product(*(range(self.axis_size(name)) for name in axes))
            members = ({**base, **dict(zip(axes, index, strict=True))} for index in inner)
            result.append(tuple(self.rank_at(member) for member in members))
        return tuple(result)

    def __str__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes)})"
