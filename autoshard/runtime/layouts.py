"""`Layouts`: the sharding of DTensors in the form that programs need, computed once for each placements and shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed.tensor.placement_types import Placement

from autoshard.ir.boundary import matches_dtensor, unpadded_shape
from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import PartitionSpec

_MOST = 4096
"""The most layouts that are kept: one for each pair of placements and shape."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The sharding of a DTensor on one rank.

    Args:
        spec: the sharding as a `PartitionSpec`.
        placements: the sharding as torch's placements.
        shape, stride: shape and stride of the whole contiguous tensor.
        is_cut_alike: whether a DTensor is split into the same pieces as in programs, apart from padding.
        padded: the shape of the rank's piece in a program, with padding; empty unless `is_cut_alike`.
        chunk: the shape of the rank's piece in the DTensor, without padding; empty unless `is_cut_alike`.
    """

    spec: PartitionSpec
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    is_cut_alike: bool
    padded: tuple[int, ...]
    chunk: tuple[int, ...]


class Layouts:
    """Computes the layouts of DTensors, as one rank of a mesh holds them, and keeps them."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._mesh = mesh
        self._rank = rank
        self._of = lru_cache(_MOST)(self._find)
        self._stored = lru_cache(_MOST)(self._find_stored)

    def of(self, placements: Sequence[Placement], shape: Sequence[int]) -> TensorLayout:
        """Return the layout of a DTensor with these placements and this shape."""
        return self._of(tuple(placements), tuple(shape))

    def stored(self, spec: PartitionSpec, shape: Sequence[int]) -> TensorLayout:
        """Return the layout of a DTensor sharded by `spec`, or by the nearest spec that placements can express."""
        return self._stored(spec, tuple(shape))

    def _find(self, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> TensorLayout:
        return self._made(PartitionSpec.from_placements(placements, self._mesh), placements, shape)

    def _find_stored(self, spec: PartitionSpec, shape: tuple[int, ...]) -> TensorLayout:
        spec = storage_spec(spec, self._mesh)
        return self._made(spec, tuple(spec.to_placements(self._mesh)), shape)

    def _made(self, spec: PartitionSpec, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> TensorLayout:
        stride = torch.empty(shape, device="meta").stride()
        is_cut_alike = matches_dtensor(spec, shape, self._mesh)
        padded = spec.local_shape(shape, self._mesh) if is_cut_alike else ()
        chunk = unpadded_shape(spec, self._mesh, shape, self._rank) if is_cut_alike else ()
        return TensorLayout(spec, placements, torch.Size(shape), stride, is_cut_alike, padded, chunk)


def storage_spec(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Return the spec nearest to `spec` that torch placements can express: each dim's axes in the order of the mesh."""
    order = {axis: index for index, axis in enumerate(mesh.axis_names)}
    dims = (tuple(sorted(axes, key=order.__getitem__)) for axes in spec.dims)
    return PartitionSpec(*dims, partial={axis: reduction.value for axis, reduction in spec.partial})
