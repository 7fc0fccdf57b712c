"""Gather a region (a slice of each dim) of a DTensor on every rank, with memory for about the region only.

`full_tensor` briefly takes two to six times the memory of the whole tensor, because it runs a collective for each axis
that splits a dim. Here, the ranks that hold parts of the region broadcast them, one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch.distributed.tensor import DTensor

from autoshard.runtime.weights.local_part import LocalPart, index_of
from autoshard.runtime.weights.unread import Region, shape_of

_C10D = torch.ops._c10d_functional


@torch.no_grad()
def gather_region(tensor: DTensor, region: Region, group: str) -> torch.Tensor:
    """Return the values in a region of the whole tensor, on every rank of its mesh. All of them must call together.

    The tensor is sharded by `Shard` and `Replicate` only. `group` is torch's name of the process group of all ranks of
    the mesh, in rank order.
    """
    mine = LocalPart.of(tensor)
    place = tuple(tensor.device_mesh.get_coordinate() or ())
    result = mine.tensor.new_empty(shape_of(region))
    for owner, rank, index in _parts(tensor):
        common = _intersection(region, index)
        if common is None:
            continue
        part = mine.tensor.new_empty(shape_of(common))
        if owner == place:
            part.copy_(mine.tensor[_within(common, index)])
        _C10D.wait_tensor.default(_C10D.broadcast_.default(part, rank, group))
        result[_within(common, region)] = part
    return result


def _parts(tensor: DTensor) -> Iterator[tuple[tuple[int, ...], int, Region]]:
    """Yield each distinct shard of a tensor: the coordinates and the number of its first rank, and its region."""
    sizes = tuple(tensor.device_mesh.shape)
    for rank, place in enumerate(product(*map(range, sizes))):
        pairs = zip(place, tensor.placements, strict=True)
        if not any(number and placement.is_replicate() for number, placement in pairs):
            yield place, rank, index_of(tensor.shape, tensor.placements, sizes, place)


def _intersection(first: Region, second: Region) -> Region | None:
    common = tuple(
        slice(max(one.start, two.start), min(one.stop, two.stop)) for one, two in zip(first, second, strict=True)
    )
    return common if all(part.start < part.stop for part in common) else None


def _within(region: Region, outer: Region) -> Region:
    """Return `region` in indices that count from the start of `outer`, a region that contains it."""
    return tuple(
        slice(part.start - around.start, part.stop - around.start) for part, around in zip(region, outer, strict=True)
    )
