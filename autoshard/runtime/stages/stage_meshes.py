"""The ranks of a pipeline stage, which hold the stage's parameters.

A parameter is a DTensor on the mesh of one stage's ranks. Every other rank has its name, its shape and the mesh, but no
values. Torch, too, has DTensors on ranks outside their mesh, so state dicts and torch.distributed.checkpoint accept
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autoshard.errors import NotAvailableError
from autoshard.ir.staged import PIPELINE_AXIS
from autoshard.runtime.agreement.lost_ranks import naming_lost_ranks


def is_elsewhere(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether only other ranks hold shards of a tensor."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None


class Elsewhere(DTensor):
    """A tensor whose shards are only on other ranks.

    On a rank outside a DTensor's mesh, torch gathers the DTensor by returning an empty tensor. This class raises
    instead. Copies in modules and state dicts keep the class.
    """

    def redistribute(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to gather."""
        raise NotAvailableError(
            f"A tensor of shape {tuple(self.shape)} is held only by other ranks of the axis 'pipeline', so torch "
            "cannot gather or save it (full_tensor, full_state_dict=True, torch.save). Use step.export(path) for whole "
            "weights, and Checkpoints for the whole state."
        )

    def full_tensor(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to gather."""
        self.redistribute()

    def to_local(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A tensor on the meta device. Writing to it does nothing, as when torch copies each rank's part."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def detach(self) -> Elsewhere:
        """Detach, keeping the class."""
        return as_elsewhere(super().detach())

    def clone(self, **kwargs: Any) -> Elsewhere:
        """Clone, keeping the class."""
        return as_elsewhere(super().clone(**kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain DTensor, so that a process without autoshard can load it."""
        return DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad).__reduce_ex__(protocol)


def as_elsewhere(tensor: torch.Tensor) -> Elsewhere:
    """Turn a DTensor on a mesh without this rank into a tensor that refuses to be gathered."""
    assert isinstance(tensor, DTensor), "a tensor on other ranks is a DTensor"
    made = Elsewhere(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)
    assert isinstance(made, Elsewhere), "the class was called above"
    return made


@dataclass(frozen=True, slots=True)
class StageMeshes:
    """The ranks of each place in a pipeline.

    Args:
        meshes: the mesh of each place's ranks, with all axes except "pipeline".
        place: the place of this process.
        group: one process of each place: the processes with this one's coordinates on the other axes.
        ranks: the ranks of these processes.
    """

    meshes: tuple[DeviceMesh, ...]
    place: int
    group: dist.ProcessGroup
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, whole: DeviceMesh) -> StageMeshes:
        """Make the meshes of all places of a mesh with an axis "pipeline"."""
        names = whole.mesh_dim_names or ()
        coordinate, dim = whole.get_coordinate(), names.index(PIPELINE_AXIS)
        assert coordinate is not None, "this process is on the mesh"
        rest, place = tuple(name for name in names if name != PIPELINE_AXIS), coordinate[dim]
        ranks = whole.mesh.movedim(dim, 0)
        own = whole[rest]
        meshes = tuple(
            own if number == place else _without_this_rank(whole.device_type, held, rest)
            for number, held in enumerate(ranks.unbind())
        )
        column = (slice(None), *(at for number, at in enumerate(coordinate) if number != dim))
        return cls(meshes, place, whole.get_group(PIPELINE_AXIS), tuple(ranks[column].tolist()))

    @property
    def own(self) -> DeviceMesh:
        """The mesh of this process's place."""
        return self.meshes[self.place]

    def elsewhere(self, like: torch.Tensor, placements: Sequence[Placement], place: int) -> DTensor:
        """A tensor of the dtype and shape of `like`, whose shards are on the ranks of another place."""
        return self.elsewhere_on(self.meshes[place], like.shape, like.dtype, placements)

    def elsewhere_on(
        self, mesh: DeviceMesh, shape: Sequence[int], dtype: torch.dtype, placements: Sequence[Placement]
    ) -> DTensor:
        """A tensor as of `elsewhere`, on one of `meshes`."""
        shape = torch.Size(shape)
        nothing = torch.empty(0 if shape else (), dtype=dtype, device=self.own.device_type)
        stride = torch.empty(shape, device="meta").stride()
        return as_elsewhere(DTensor.from_local(nothing, mesh, placements, run_check=False, shape=shape, stride=stride))

    def share(
        self, place: int, make: Callable[[], torch.Tensor], shape: Sequence[int], like: torch.Tensor
    ) -> torch.Tensor:
        """Broadcast the result of `make` from one place of the pipeline to all; it has this shape and `like`'s dtype.

        All ranks of the mesh must call.
        """
        if place == self.place:
            value = make().detach().contiguous()
        else:
            value = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
        with naming_lost_ranks():
            dist.broadcast(value, self.ranks[place], self.group)
        return value


def _without_this_rank(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of other ranks, without a process group, because this process does not communicate on it."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)
