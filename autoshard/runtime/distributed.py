"""The engine of torch.distributed: one process per rank, process groups from a `DeviceMesh`, parameters as DTensors.

A program works on local tensors. The engine takes them out of DTensors before the program, and puts results into
DTensors after it. If a DTensor's sharding differs from the program's spec, a small program reshards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from operator import is_
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.fx.proxy import GraphAppendingTracer

from autoshard.errors import MeshError, NotAvailableError
from autoshard.ir.boundary import pad_local, unpad_local
from autoshard.ir.emit import emit_reshard
from autoshard.ir.lowered import LocalSlot
from autoshard.ir.mesh import Mesh
from autoshard.ir.reshard import plan_reshard
from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.agreement.control_channel import TIMEOUT_S
from autoshard.runtime.agreement.control_group import ControlGroup, Facts
from autoshard.runtime.agreement.lost_ranks import naming_lost_ranks
from autoshard.runtime.engine import NO_PIPELINE_RANKS, NOTHING, Loaded
from autoshard.runtime.freed_memory import keep_freed_memory
from autoshard.runtime.graph_loader import GraphLoader, Loading
from autoshard.runtime.known_layouts import LikeWriter, Reader, are_dtensors, is_same_memory, local_of
from autoshard.runtime.layouts import Layouts, TensorLayout
from autoshard.runtime.parameters import give_buffers_memory, memory_of, swap_parameter, take_over_parameters
from autoshard.runtime.pickled_shards import pickle_wholes_alone
from autoshard.runtime.process_groups import ProcessGroups
from autoshard.runtime.profiling.ranges import Ranges
from autoshard.runtime.split_output import SplitOutput
from autoshard.runtime.stages.stage_meshes import StageMeshes, is_elsewhere
from autoshard.runtime.state_in_loops import check_states_again
from autoshard.runtime.weights.gather_region import gather_region
from autoshard.runtime.weights.local_part import index_of
from autoshard.runtime.weights.unread import shape_of

T = TypeVar("T")

REPLICATED = PartitionSpec()

SMALL_BYTES = 2**20
"""A tensor of at most this many bytes is gathered whole, even if only a region of it is wanted."""

_MOST_RESHARDS = 1024
"""The largest number of loaded reshard programs to keep. Each input or output of a program may need several."""


class DistributedEngine:
    """Runs programs with this process as one rank of `device_mesh`. A local value is this rank's tensor.

    Args:
        device_mesh: the ranks that run a program.
        loading: changes and checks graphs before they run.
        timeout_s: seconds that ranks wait for a rank that shows no sign of life.
        control: the ranks that compare their programs; default: the ranks of `device_mesh`.
        outer: the groups of the mesh of all ranks, if `device_mesh` is the mesh of a pipeline rank.
        stages: the mesh of each pipeline rank; `device_mesh` is one of them. None without a pipeline.
    """

    def __init__(
        self,
        device_mesh: DeviceMesh,
        loading: Loading = Loading(),  # noqa: B008  (frozen)
        timeout_s: float = TIMEOUT_S,
        control: ControlGroup | None = None,
        outer: ProcessGroups | None = None,
        stages: StageMeshes | None = None,
    ) -> None:
        if device_mesh.get_coordinate() is None:
            raise MeshError(f"{device_mesh} does not contain this process (rank {torch.distributed.get_rank()}).")
        self.device_mesh = device_mesh
        self._stages = stages
        self.groups = ProcessGroups(device_mesh, timeout_s, outer)
        self.control = control or ControlGroup(device_mesh.mesh.flatten().tolist(), timeout_s)
        self._loader = GraphLoader(self.groups, self.control, loading)
        self._has_compiler = loading.wrap is not None
        self._reshard_loaded = lru_cache(_MOST_RESHARDS)(self._load_reshard)
        self._layouts = Layouts(self.groups.mesh, self.groups.rank)
        pickle_wholes_alone([device_mesh] if stages is None else stages.meshes)
        if self.groups.on_cpu:
            keep_freed_memory()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedEngine:
        """Return the engine itself: copies of a model run on the same ranks."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise `NotAvailableError`: process groups belong to this run, and a rank holds only its shards."""
        raise NotAvailableError(
            f"A model that runs on {self.mesh} with a process per rank cannot be pickled (by torch.save, say). Its "
            "process groups belong to this run, and a rank holds only its shards. Save sharded.state_dict() with "
            "torch.distributed.checkpoint, and load it into a newly compiled model; copy.deepcopy works."
        )

    @property
    def mesh(self) -> Mesh:
        return self.groups.mesh

    @property
    def ranges(self) -> Ranges:
        return self._loader.ranges

    @property
    def device(self) -> torch.device:
        kind = self.device_mesh.device_type
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())

    def load(self, graph_module: fx.GraphModule, written: Mapping[int, int] = NOTHING) -> Loaded:
        """Make a lowered graph ready to run on this rank, see `GraphLoader.load`."""
        return self._loader.load(graph_module, written)

    def load_adding(self, graph_module: fx.GraphModule, owned: Sequence[bool]) -> Loaded | None:
        """Make a graph ready to run that adds its last results to sums, see `GraphLoader.load_adding`."""
        return self._loader.load_adding(graph_module, owned)

    def read(self, tensor: torch.Tensor, slot: LocalSlot) -> torch.Tensor:
        if tuple(tensor.shape) != slot.shape:
            raise MeshError(f"{slot.slot.name} has shape={tuple(tensor.shape)}, but the program expects {slot.shape}.")
        if isinstance(tensor, DTensor):
            value, spec = self._take_out(tensor)
        else:
            value, spec = tensor.detach().contiguous(), REPLICATED
        return self._reshard(value, spec, slot.spec, slot)

    def reader(self, slots: Sequence[LocalSlot]) -> Reader:
        return Reader(slots, self.read)

    def like_writer(self, slots: Sequence[LocalSlot]) -> LikeWriter:
        return LikeWriter(slots, self.write_like)

    def write(self, value: torch.Tensor, slot: LocalSlot) -> torch.Tensor:
        return self._reshard(value, slot.spec, REPLICATED, slot)

    def write_sharded(self, value: torch.Tensor, slot: LocalSlot) -> torch.Tensor:
        return SplitOutput.of(self._put_in(value, slot, self._layouts.stored(slot.spec, slot.shape)))

    def write_like(self, value: torch.Tensor, slot: LocalSlot, like: torch.Tensor) -> torch.Tensor:
        if not isinstance(like, DTensor):
            return self.write(value, slot)
        return self._put_in(value, slot, self._layouts.of(like.placements, slot.shape))

    def store(
        self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor], slots: Sequence[LocalSlot]
    ) -> None:
        """Copy local values into the user's tensors. A value that already lies in its tensor's memory is not copied."""
        if are_dtensors(tensors) and all(map(is_, map(local_of, tensors), values)):
            return
        for tensor, value, slot in zip(tensors, values, slots, strict=True):
            if isinstance(tensor, DTensor):
                self._store_local(tensor, value, slot)
            else:
                tensor.copy_(self.write(value, slot))

    def _store_local(self, tensor: DTensor, value: torch.Tensor, slot: LocalSlot) -> None:
        local = tensor._local_tensor
        if is_same_memory(value, local):
            return
        found = self.write_like(value, slot, tensor)
        assert isinstance(found, DTensor), "a value that is written like a DTensor is one"
        if not is_same_memory(found._local_tensor, local):
            local.copy_(found._local_tensor)

    def zeros(self, slot: LocalSlot, beside: torch.Tensor | None = None) -> torch.Tensor:
        layout = self._layouts.stored(slot.spec, slot.shape)
        if beside is not None and is_elsewhere(beside):
            return self._on_mesh_of(beside, slot.shape, slot.dtype, layout.placements)
        local = torch.zeros(layout.spec.local_shape(slot.shape, self.mesh), dtype=slot.dtype, device=self.device)
        return self._from_local(unpad_local(local, layout.spec, self.mesh, slot.shape, self.groups.rank), layout)

    def reshard(self, value: torch.Tensor, source: LocalSlot, target: LocalSlot) -> torch.Tensor:
        return self._reshard(value, source.spec, target.spec, target)

    def lay_out(self, tensor: torch.Tensor, slot: LocalSlot) -> torch.Tensor:
        layout = self._layouts.stored(slot.spec, slot.shape)
        if isinstance(tensor, DTensor):
            if tensor.placements == layout.placements and self._is_on_mesh(tensor):
                return tensor
            tensor = whole(tensor)
        return self._shard(tensor.to(self.device), layout.placements)

    @torch.no_grad()
    def lay_out_like(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if is_elsewhere(like):
            return self._on_mesh_of(like, like.shape, tensor.dtype, like.placements)
        return self._shard(tensor.to(self.device), like.placements) if isinstance(like, DTensor) else tensor

    @torch.no_grad()
    def add(self, sums: list[torch.Tensor], addends: list[torch.Tensor], owned: Sequence[bool] | None = None) -> None:
        """Add each of `addends` to its sum.

        With a compiler (`wrap`), results of graphs may share memory. So a given `owned` counts as false for each sum.
        """
        if owned is not None and self._has_compiler:
            owned = [False] * len(sums)
        in_place = [index for index in range(len(sums)) if owned is None or owned[index]]
        if in_place:
            pairs = [sums[index] for index in in_place], [addends[index] for index in in_place]
            torch.ops.aten._foreach_add_.List(*pairs)
        anew = sorted(set(range(len(sums))).difference(in_place))
        left = [addends[index] for index in anew]
        addends.clear()
        for index in anew:
            sums[index] = sums[index] + left.pop(0)

    def adopt(self, model: nn.Module) -> None:
        """Replace the parameters of `model` by DTensors. Until `place` shards them, each rank holds them whole."""
        take_over_parameters(model, self._replicate)
        check_states_again()

    def has_adopted(self, parameter: torch.Tensor) -> bool:
        return isinstance(parameter, DTensor)

    def place(
        self,
        model: nn.Module,
        specs: Mapping[str, PartitionSpec],
        pipeline_rank_of: Mapping[str, int] = NO_PIPELINE_RANKS,
    ) -> None:
        """Shard the parameters of `model` by `specs`, so that each rank keeps only its shards.

        `pipeline_rank_of` has the pipeline rank that alone holds a parameter, by the parameter's name.
        """
        for name, parameter in model.named_parameters():
            placements = self._layouts.stored(specs.get(name, REPLICATED), parameter.shape).placements
            if (
                self._stages is not None
                and name in pipeline_rank_of
                and pipeline_rank_of[name] != self._stages.pipeline_rank
            ):
                if not is_elsewhere(parameter):
                    give_up = partial(
                        self._stages.tensor_on_rank, placements=placements, pipeline_rank=pipeline_rank_of[name]
                    )
                    swap_parameter(parameter, give_up)
            elif isinstance(parameter, DTensor) and (parameter.placements != placements or parameter.is_meta):
                swap_parameter(parameter, partial(self._shard, placements=placements))
        give_buffers_memory(model, self.device)

    def global_copy(self, tensor: torch.Tensor, pipeline_rank: int | None = None) -> torch.Tensor:
        if pipeline_rank is not None and self._stages is not None:
            return self._stages.share(pipeline_rank, lambda: self.global_copy(tensor), tensor.shape, tensor)
        return whole(tensor) if isinstance(tensor, DTensor) else tensor.detach()

    def gather_region(
        self, tensor: torch.Tensor, region: tuple[slice, ...], pipeline_rank: int | None = None
    ) -> torch.Tensor:
        """Return the values in `region` of a parameter, buffer or input, on every rank.

        `pipeline_rank` alone holds the tensor; None: every rank has its shard. A tensor of at most `SMALL_BYTES` is
        gathered whole first.
        """
        if pipeline_rank is not None and self._stages is not None:
            shape = shape_of(region)
            return self._stages.share(pipeline_rank, lambda: self.gather_region(tensor, region), shape, tensor)
        if not isinstance(tensor, DTensor) or tensor.nbytes <= SMALL_BYTES:
            return self.global_copy(tensor)[region]
        with naming_lost_ranks():
            return gather_region(tensor, region, self.groups.name(",".join(self.mesh.axis_names)))

    def agree(self, facts: Callable[[], Facts]) -> None:
        self.control.agree(facts)

    def share(self, compute: Callable[[], T]) -> T:
        return self.control.share(compute)

    def _on_mesh_of(
        self, tensor: DTensor, shape: Sequence[int], dtype: torch.dtype, placements: Sequence[Placement]
    ) -> DTensor:
        """Return a DTensor on the ranks that hold `tensor`. This rank is not one of them, so its part is empty."""
        assert self._stages is not None, "only a pipeline has ranks elsewhere"
        return self._stages.tensor_on_mesh(tensor.device_mesh, shape, dtype, placements)

    def _replicate(self, parameter: torch.Tensor) -> torch.Tensor:
        if isinstance(parameter, DTensor):
            self._check_mesh(parameter)
            return parameter
        everywhere = [Replicate()] * len(self.mesh.axes)
        return DTensor.from_local(parameter.detach(), self.device_mesh, everywhere, run_check=False)

    def _shard(self, tensor: torch.Tensor, placements: Sequence) -> DTensor:
        """Return a copy of a parameter or gradient, which may be a DTensor, sharded by `placements` in new memory."""
        full = whole(tensor) if isinstance(tensor, DTensor) else tensor.detach()
        local = memory_of(self._part(full, placements), self.device)
        return self._from_local(local, self._layouts.of(placements, full.shape))

    def _part(self, full: torch.Tensor, placements: Sequence) -> torch.Tensor:
        """Return this rank's part of a whole tensor, as a view if possible, because memory may be short."""
        if not all(type(placement) in (Shard, Replicate) for placement in placements):
            return distribute_tensor(full, self.device_mesh, placements, src_data_rank=None).to_local().detach()
        coordinate = self.device_mesh.get_coordinate()
        assert coordinate is not None, "this process is on the mesh"
        index = index_of(full.shape, placements, tuple(self.device_mesh.shape), coordinate)
        for dim, kept in enumerate(index):  # not `full[index]`, which needs the device of a fake CUDA tensor
            full = full.narrow(dim, kept.start, kept.stop - kept.start)
        return full

    def _take_out(self, tensor: DTensor) -> tuple[torch.Tensor, PartitionSpec]:
        """Return a DTensor's local value, padded as in programs, and its spec.

        A DTensor whose pieces differ from those of programs is gathered, and its spec is replicated.
        """
        self._check_mesh(tensor)
        layout = self._layouts.of(tensor.placements, tensor.shape)
        if not layout.is_cut_alike:
            return whole(tensor), REPLICATED
        local = tensor._local_tensor.detach().contiguous()
        is_padded = tuple(local.shape) == layout.padded
        return local if is_padded else pad_local(local, layout.spec, self.mesh, layout.shape), layout.spec

    def _put_in(self, value: torch.Tensor, slot: LocalSlot, layout: TensorLayout) -> DTensor:
        """Return a DTensor with `layout`, from a padded local value that has the slot's spec."""
        if not layout.is_cut_alike:
            return distribute_tensor(self.write(value, slot), self.device_mesh, layout.placements, src_data_rank=None)
        local = self._reshard(value, slot.spec, layout.spec, slot)
        if tuple(local.shape) != layout.chunk:
            local = unpad_local(local, layout.spec, self.mesh, slot.shape, self.groups.rank)
        return self._from_local(local.contiguous(), layout)

    def _from_local(self, local: torch.Tensor, layout: TensorLayout) -> DTensor:
        return DTensor.from_local(
            local, self.device_mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride
        )

    def _reshard(
        self, value: torch.Tensor, source: PartitionSpec, target: PartitionSpec, slot: LocalSlot
    ) -> torch.Tensor:
        if source == target:
            return value
        return self._reshard_loaded(source, target, slot.shape, slot.dtype)([value])[0]

    def _load_reshard(
        self, source: PartitionSpec, target: PartitionSpec, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Loaded:
        return DistributedEngine.load(self, reshard_program(source, target, shape, dtype, self.mesh))

    def _is_on_mesh(self, tensor: DTensor) -> bool:
        return tensor.device_mesh == self.device_mesh

    def _check_mesh(self, tensor: DTensor) -> None:
        if not self._is_on_mesh(tensor):
            raise MeshError(
                f"A DTensor of shape={tuple(tensor.shape)} lies on {tensor.device_mesh}, but the model was compiled "
                f"for {self.device_mesh}. Make it on the same DeviceMesh (sharded.engine.device_mesh)."
            )


@torch.no_grad()
def whole(tensor: DTensor) -> torch.Tensor:
    """Gather a DTensor on every rank, and return its global value, detached.

    Gloo copies the gathered bytes, so a large tensor is gathered in slices along a dim that is not split.
    """
    dim = _dim_to_slice(tensor)
    with naming_lost_ranks():
        if dim is None:
            return tensor.full_tensor().detach()
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        pieces = -(-tensor.nbytes // _GATHERED_AT_ONCE_BYTES)
        step = -(-tensor.shape[dim] // pieces)
        for first in range(0, tensor.shape[dim], step):
            size = min(step, tensor.shape[dim] - first)
            part = tensor.detach().narrow(dim, first, size)
            assert isinstance(part, DTensor), "a slice of a DTensor is a DTensor"
            result.narrow(dim, first, size).copy_(part.full_tensor())
        return result


_GATHERED_AT_ONCE_BYTES = 8 << 20


def _dim_to_slice(tensor: DTensor) -> int | None:
    """Return the dim along which to gather a tensor in slices, or None to gather it at once."""
    if tensor.device.type != "cpu" or tensor.nbytes <= _GATHERED_AT_ONCE_BYTES:
        return None
    if all(placement.is_replicate() for placement in tensor.placements):
        return None
    free = [dim for dim in range(tensor.dim()) if not any(place.is_shard(dim) for place in tensor.placements)]
    return max(free, key=lambda dim: tensor.shape[dim], default=None)


def reshard_program(
    source: PartitionSpec, target: PartitionSpec, shape: Sequence[int], dtype: torch.dtype, mesh: Mesh
) -> fx.GraphModule:
    """Return a lowered graph that reshards a local value from spec `source` to spec `target`.

    `shape` is the value's global shape.
    """
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    steps = plan_reshard(source, target, shape, mesh, itemsize=dtype.itemsize)
    value = fx.Proxy(graph.placeholder("value"), tracer)
    result = emit_reshard(value, steps, shape, mesh, dtype=dtype)
    graph.output((result.node,))
    return fx.GraphModule(nn.Module(), graph)
