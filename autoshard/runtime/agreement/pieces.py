"""The piece of a tensor that this rank holds, and the coordinates of the piece, equal on ranks with the same piece."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.runtime.agreement.control_group import Facts, PieceFact
from autoshard.runtime.agreement.digests import digest_of
from autoshard.runtime.known_layouts import local_of
from autoshard.runtime.stages.stage_meshes import is_elsewhere

WHOLE = str(())
"""The coordinates, as text, of a tensor that every rank holds whole."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """This rank's piece of a tensor.

    Args:
        local: the piece; the whole tensor if it is not split.
        shard_coordinates: for each mesh axis that splits the tensor, the number of the axis and this rank's index along
            it. Ranks with equal coordinates hold the same piece.
    """

    local: torch.Tensor
    shard_coordinates: tuple[tuple[int, int], ...]


def piece_of(tensor: torch.Tensor) -> TensorPiece:
    """Return this rank's piece of a tensor. A plain tensor is its own piece, as every rank holds it whole."""
    if not isinstance(tensor, DTensor):
        return TensorPiece(tensor, ())
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this process is on the mesh"
    return TensorPiece(local_of(tensor), tuple((dim, coordinate[dim]) for dim in _cut_dims(tensor)))


def copies_of(tensor: torch.Tensor, ranks: int) -> int:
    """Return the number of ranks that hold the same piece of a tensor: all `ranks` for a plain tensor.

    `ranks` counts the ranks that hold a piece of the tensor. For an input, these are the ranks of all pipeline stages,
    because each stage has a copy of the input.
    """
    parts = [tensor.device_mesh.size(dim) for dim in _cut_dims(tensor)] if isinstance(tensor, DTensor) else []
    return ranks // math.prod(parts)


def _cut_dims(tensor: DTensor) -> list[int]:
    mesh = tensor.device_mesh
    return [dim for dim, item in enumerate(tensor.placements) if not item.is_replicate() and mesh.size(dim) > 1]


def facts_of(named: Iterable[tuple[str, torch.Tensor]]) -> Facts:
    """Return a digest of this rank's piece of each named tensor, as facts. Ranks with the same piece compare them."""
    pieces = ((name, piece_of(tensor)) for name, tensor in named if not is_elsewhere(tensor))
    return {PieceFact(name, str(piece.shard_coordinates)): digest_of(piece.local) for name, piece in pieces}


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a model, each with its name in messages, such as `parameter 'a.weight'`."""
    parameters = [(f"parameter {name!r}", item) for name, item in model.named_parameters()]
    return [*parameters, *((f"buffer {name!r}", item) for name, item in model.named_buffers())]
