"""Meshes of the ranks of each pipeline stage, and DTensors whose values only the ranks of another stage hold.

A parameter is a DTensor on the mesh of one stage's ranks. Every other rank knows its name, shape and mesh, but has no
values; state dicts and torch.distributed.checkpoint accept such DTensors. A pipeline rank is an index along the mesh
axis "pipeline", and stands for all processes with this index.
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
    """Whether a tensor is a DTensor whose shards are all on other ranks."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None


class OtherStageTensor(DTensor):
    """A DTensor whose shards are all on other ranks.

    On a rank outside a DTensor's mesh, `full_tensor` of torch returns an empty tensor. This class raises an error.
    Copies in modules and state dicts keep the class.
    """

    def redistribute(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `NotAvailableError`, because this rank cannot gather the tensor."""
        raise NotAvailableError(
            f"A tensor of shape {tuple(self.shape)} is held only by other ranks of the axis 'pipeline', so torch "
            "cannot gather or save it (full_tensor, full_state_dict=True, torch.save). Use step.export(path) for whole "
            "weights, and Checkpoints for the whole state."
        )

    def full_tensor(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `NotAvailableError`, because this rank cannot gather the tensor."""
        self.redistribute()

    def to_local(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a meta tensor of the whole shape. Torch writes this rank's part to it, which has no effect."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def detach(self) -> OtherStageTensor:
        """Return the detached tensor as an `OtherStageTensor`."""
        return as_other_stage_tensor(super().detach())

    def clone(self, **kwargs: Any) -> OtherStageTensor:
        """Return a copy as an `OtherStageTensor`."""
        return as_other_stage_tensor(super().clone(**kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensor as a plain DTensor, so that a process without autoshard can load it."""
        return DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad).__reduce_ex__(protocol)


def as_other_stage_tensor(tensor: torch.Tensor) -> OtherStageTensor:
    """Return a DTensor, on a mesh without this rank, as an `OtherStageTensor`. Gathering it raises an error."""
    assert isinstance(tensor, DTensor), "a tensor on other ranks is a DTensor"
    made = OtherStageTensor(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)
    assert isinstance(made, OtherStageTensor), "the class was called above"
    return made


@dataclass(frozen=True, slots=True)
class StageMeshes:
    """The mesh of each pipeline rank.

    Args:
        meshes: for each pipeline rank, the mesh of its processes, with all axes except "pipeline".
        pipeline_rank: the pipeline rank of this process.
        group: the processes whose coordinates differ from this process's only along "pipeline".
        ranks: the global ranks of the processes of `group`, in the order of pipeline ranks.
    """

    meshes: tuple[DeviceMesh, ...]
    pipeline_rank: int
    group: dist.ProcessGroup
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, whole: DeviceMesh) -> StageMeshes:
        """Return the meshes of all pipeline ranks, from the mesh of all processes, which has an axis "pipeline"."""
        names = whole.mesh_dim_names or ()
        coordinate, dim = whole.get_coordinate(), names.index(PIPELINE_AXIS)
        assert coordinate is not None, "this process is on the mesh"
        rest, pipeline_rank = tuple(name for name in names if name != PIPELINE_AXIS), coordinate[dim]
        ranks = whole.mesh.movedim(dim, 0)
        own = whole[rest]
        meshes = tuple(
            own if number == pipeline_rank else _without_this_rank(whole.device_type, held, rest)
            for number, held in enumerate(ranks.unbind())
        )
        column = (slice(None), *(at for number, at in enumerate(coordinate) if number != dim))
        return cls(meshes, pipeline_rank, whole.get_group(PIPELINE_AXIS), tuple(ranks[column].tolist()))

    @property
    def own(self) -> DeviceMesh:
        """The mesh of this process's pipeline rank, without the axis "pipeline"."""
        return self.meshes[self.pipeline_rank]

    def tensor_on_rank(self, like: torch.Tensor, placements: Sequence[Placement], pipeline_rank: int) -> DTensor:
        """Return a DTensor with dtype and shape of `like`, whose shards are on another pipeline rank's processes."""
        return self.tensor_on_mesh(self.meshes[pipeline_rank], like.shape, like.dtype, placements)

    def tensor_on_mesh(
        self, mesh: DeviceMesh, shape: Sequence[int], dtype: torch.dtype, placements: Sequence[Placement]
    ) -> DTensor:
        """Return a DTensor of this shape and dtype whose shards are on `mesh`, the mesh of another pipeline rank."""
        shape = torch.Size(shape)
        nothing = torch.empty(0 if shape else (), dtype=dtype, device=self.own.device_type)
        stride = torch.empty(shape, device="meta").stride()
        return as_other_stage_tensor(
            DTensor.from_local(nothing, mesh, placements, run_check=False, shape=shape, stride=stride)
        )

    def share(
        self, pipeline_rank: int, make: Callable[[], torch.Tensor], shape: Sequence[int], like: torch.Tensor
    ) -> torch.Tensor:
        """Run `make` on one pipeline rank, broadcast its result to all pipeline ranks, and return the result.

        All ranks of the mesh must call this.

        Args:
            pipeline_rank: the pipeline rank that runs `make`.
            make: returns the tensor.
            shape: the tensor's shape.
            like: a tensor with the dtype and device of the result.
        """
        if pipeline_rank == self.pipeline_rank:
            value = make().detach().contiguous()
        else:
            value = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
        with naming_lost_ranks():
            dist.broadcast(value, self.ranks[pipeline_rank], self.group)
        return value


def _without_this_rank(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of other ranks. It has no process groups, because this process does not communicate on it."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)
