"""`LocalPart`: this rank's part of a tensor, and its position in the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autoshard.errors import NotAvailableError


@dataclass(frozen=True, slots=True)
class LocalPart:
    """This rank's part of a tensor; empty if only other ranks hold the tensor.

    Args:
        tensor: the part in the rank's own memory; writes to it are writes to the whole tensor.
        offset: index of the part's first element in the whole tensor.
        shape: shape of the whole tensor.
    """

    tensor: torch.Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    @torch.no_grad()
    def of(tensor: torch.Tensor) -> LocalPart:
        """Return this rank's part of a DTensor; of a plain tensor, the whole.

        Raises:
            NotAvailableError: the DTensor is partial.
        """
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return LocalPart(tensor.detach(), (0,) * len(shape), shape)
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            nothing = torch.empty((0,) * len(shape), dtype=tensor.dtype, device=tensor.device)
            return LocalPart(nothing, (0,) * len(shape), shape)
        sizes = [tensor.device_mesh.size(dim) for dim in range(tensor.device_mesh.ndim)]
        index = index_of(shape, tensor.placements, sizes, coordinate)
        return LocalPart(tensor.to_local().detach(), tuple(part.start for part in index), shape)


def index_of(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[slice, ...]:
    """Return the position of one rank's shard of a DTensor, as slices of the whole tensor.

    Args:
        shape: shape of the whole tensor.
        placements: torch's placements, one for each dim of the mesh.
        sizes: the sizes of the mesh's dims.
        coordinate: the rank's index along each dim of the mesh.

    Example:
        >>> index_of((9,), (Shard(0), Shard(0)), (2, 2), (1, 0))
        (slice(5, 7, None),)
    """
    offset, left = [0] * len(shape), list(shape)
    for placement, size, place in zip(placements, sizes, coordinate, strict=True):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard:
            raise NotAvailableError(f"A tensor of shape={tuple(shape)} lies as {placement}; only shards have an index.")
        dim = placement.dim % len(shape)
        chunk = -(-left[dim] // size)
        start = min(place * chunk, left[dim])
        offset[dim] += start
        left[dim] = min(chunk, left[dim] - start)
    return tuple(slice(start, start + size) for start, size in zip(offset, left, strict=True))
