"""What ranks hold alike: the pieces of tensors, and at which place of the mesh a piece belongs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.runtime.agreement import Facts, Held
from autoshard.runtime.digests import digest_of
from autoshard.runtime.known_layouts import local_of
from autoshard.runtime.stage_meshes import is_elsewhere

WHOLE = str(())
"""The place of what every rank holds whole."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank holds of a tensor.

    Args:
        local: its part, or the whole.
        place: dims of the device mesh that the tensor is cut along, and this rank's index there: ranks with equal
            places hold equal pieces. Empty where every rank holds the whole.
        copies: how many ranks hold it.
    """

    local: torch.Tensor
    place: tuple[tuple[int, int], ...]
    copies: int


def piece_of(tensor: torch.Tensor, ranks: int) -> Piece:
    """What this rank holds of a tensor, of which a plain one is the same on all so many `ranks`."""
    if not isinstance(tensor, DTensor):
        return Piece(tensor, (), ranks)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this process is on the mesh"
    cut = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    copies = mesh.size()
    for dim in cut:
        copies //= mesh.size(dim)
    return Piece(local_of(tensor), tuple((dim, coordinate[dim]) for dim in cut if mesh.size(dim) > 1), copies)


def facts_of(named: Iterable[tuple[str, torch.Tensor]], ranks: int) -> Facts:
    """The digest of each piece, for the ranks that hold it, by the name of its tensor."""
    pieces = ((name, piece_of(tensor, ranks)) for name, tensor in named if not is_elsewhere(tensor))
    return {Held(name, str(piece.place)): digest_of(piece.local) for name, piece in pieces}


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, by what messages call them."""
    parameters = [(f"parameter {name!r}", item) for name, item in model.named_parameters()]
    return [*parameters, *((f"buffer {name!r}", item) for name, item in model.named_buffers())]
