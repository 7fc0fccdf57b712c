"""The ranks of a pipeline that hold a parameter.

A parameter lies on the ranks at one place alone, as a DTensor on the mesh of these. Every other rank has its name, its
shape and that mesh, and nothing in it. Torch too has DTensors on ranks outside their mesh, so state dicts and
torch.distributed.checkpoint take them as they are.
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
    """Whether only other ranks hold parts of a tensor."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None


class Elsewhere(DTensor):
    """A tensor of which only other ranks hold parts.

    Torch gathers a DTensor on a rank outside its mesh by giving back the nothing that the rank holds. This class
    refuses instead, and remains what it is where modules and state dicts copy it.
    """

    def redistribute(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to gather."""
        raise NotAvailableError(
            f"A tensor of shape {tuple(self.shape)} is held by other ranks of the axis 'pipeline' alone, so torch "
            "cannot gather or save it (full_tensor, full_state_dict=True, torch.save). Use step.export(path) for whole "
            "weights, and Checkpoints for the whole state."
        )

    def full_tensor(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to gather."""
        self.redistribute()

    def to_local(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """An outline without memory. To write into it does nothing, as torch does where each rank takes its part."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def detach(self) -> Elsewhere:
        """See `torch.Tensor.detach`."""
        return as_elsewhere(super().detach())

    def clone(self, **kwargs: Any) -> Elsewhere:
        """See `torch.Tensor.clone`."""
        return as_elsewhere(super().clone(**kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the DTensor that it is for torch, so that a process of torch alone takes what a rank sends it."""
        return DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad).__reduce_ex__(protocol)


def as_elsewhere(tensor: torch.Tensor) -> Elsewhere:
    """A DTensor on a mesh without this rank, as one that refuses to be gathered."""
    assert isinstance(tensor, DTensor), "a tensor that is elsewhere is a DTensor"
    made = Elsewhere(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)
    assert isinstance(made, Elsewhere), "a class makes its own"
    return made


@dataclass(frozen=True, slots=True)
class StageMeshes:
    """The ranks at each place of a pipeline.

    Args:
        meshes: of each place: the mesh of its ranks, which has the axes that the pipeline leaves.
        place: of this process.
        group: one process of each place: those with this one's coordinates on the other axes.
        ranks: the numbers of these processes.
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
        """A tensor of the type and shape of `like`, which the ranks at another place hold."""
        return self.elsewhere_on(self.meshes[place], like.shape, like.dtype, placements)

    def elsewhere_on(
        self, mesh: DeviceMesh, shape: Sequence[int], dtype: torch.dtype, placements: Sequence[Placement]
    ) -> DTensor:
        """As `elsewhere`, by one of `meshes`."""
        shape = torch.Size(shape)
        nothing = torch.empty(0 if shape else (), dtype=dtype, device=self.own.device_type)
        stride = torch.empty(shape, device="meta").stride()
        return as_elsewhere(DTensor.from_local(nothing, mesh, placements, run_check=False, shape=shape, stride=stride))

    def share(
        self, place: int, make: Callable[[], torch.Tensor], shape: Sequence[int], like: torch.Tensor
    ) -> torch.Tensor:
        """Broadcast the result of `make`, of this shape and the type of `like`, from one place of the pipeline to all.

        Called by all ranks of the mesh.
        """
        if place == self.place:
            value = make().detach().contiguous()
        else:
            value = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
        with naming_lost_ranks():
            dist.broadcast(value, self.ranks[place], self.group)
        return value


def _without_this_rank(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of other ranks: no process group is made, as this process has no part in what they say."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)
