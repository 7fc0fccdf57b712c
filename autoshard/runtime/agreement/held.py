"""What ranks hold alike: the pieces of tensors, and at which place of the mesh a piece belongs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.runtime.agreement.control_group import Facts, HeldFact
from autoshard.runtime.agreement.digests import digest_of
from autoshard.runtime.known_layouts import local_of
from autoshard.runtime.stages.stage_meshes import is_elsewhere

WHOLE = str(())
"""The place of what every rank holds whole."""


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """What a rank holds of a tensor.

    Args:
        local: its part, or the whole.
        place: dims of the device mesh that the tensor is cut along, and this rank's index there: ranks with equal
            places hold equal pieces. Empty where every rank holds the whole.
    """

    local: torch.Tensor
    place: tuple[tuple[int, int], ...]


def piece_of(tensor: torch.Tensor) -> HeldPiece:
    """This rank's part of a tensor. A plain tensor is the same on all ranks."""
    if not isinstance(tensor, DTensor):
        return HeldPiece(tensor, ())
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this process is on the mesh"
    return HeldPiece(local_of(tensor), tuple((dim, coordinate[dim]) for dim in _cut_dims(tensor)))


def copies_of(tensor: torch.Tensor, ranks: int) -> int:
    """How many of `ranks` hold the same piece of a tensor; a plain one is the same on all.

    An input lies alike on the ranks of every stage of a pipeline: `ranks` are those of all stages.
    """
    parts = [tensor.device_mesh.size(dim) for dim in _cut_dims(tensor)] if isinstance(tensor, DTensor) else []
    return ranks // math.prod(parts)


def _cut_dims(tensor: DTensor) -> list[int]:
    mesh = tensor.device_mesh
    return [dim for dim, item in enumerate(tensor.placements) if not item.is_replicate() and mesh.size(dim) > 1]


def facts_of(named: Iterable[tuple[str, torch.Tensor]]) -> Facts:
    """The digest of each piece, for the ranks that hold it, by the name of its tensor."""
    pieces = ((name, piece_of(tensor)) for name, tensor in named if not is_elsewhere(tensor))
    return {HeldFact(name, str(piece.place)): digest_of(piece.local) for name, piece in pieces}


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, by what messages call them."""
    parameters = [(f"parameter {name!r}", item) for name, item in model.named_parameters()]
    return [*parameters, *((f"buffer {name!r}", item) for name, item in model.named_buffers())]
