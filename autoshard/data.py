"""Loading only what a rank computes with: `autoshard.data.sampler`.

By default each rank passes the whole batch and computes its part. With a sampler, a rank loads its rows alone, and what
it passes is a DTensor that says so; the program then reads it where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils import _pytree as pytree
from torch.utils.data import Sampler

from autoshard.errors import NotAvailableError, TraceError
from autoshard.ir.lowered import LocalSlot
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import InputKind
from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.distributed import DistributedEngine
from autoshard.runtime.micro_batches import CutBatch
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep


@dataclass(frozen=True, slots=True)
class Layout:
    """How this process's rows lie among all: DTensors of `placements` on `device_mesh`."""

    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]


class RankSampler(Sampler[int]):
    """This rank's rows of each global batch, in the order in which they lie there. Made by `sampler`.

    Args:
        length: samples of the dataset. What is left behind the last whole batch is not drawn.
        global_batch: samples of a batch on all ranks.
        pieces, index: into how many each micro-batch is cut, and which of these is this rank's.
        micro_batches: equal parts of a batch, which a step runs one after another; this rank has rows of each.
        shuffle: draw in an order of their own for each epoch, the same on all ranks, from `seed`.
        layout: what `whole` makes of this rank's rows; None where they are the whole batch.
    """

    def __init__(
        self,
        length: int,
        global_batch: int,
        *,
        pieces: int = 1,
        index: int = 0,
        micro_batches: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        layout: Layout | None = None,
    ) -> None:
        self.length, self.global_batch = length, global_batch
        self.pieces, self.index, self.micro_batches = pieces, index, micro_batches
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.layout = layout

    @property
    def batch_size(self) -> int:
        """Rows of a batch that this rank loads: for `DataLoader(dataset, batch_size=..., sampler=...)`."""
        return self.global_batch // self.pieces

    def set_epoch(self, epoch: int) -> None:
        """Draw in the order of this epoch from now on, as `torch.utils.data.DistributedSampler.set_epoch`."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.length)
        if self.shuffle:
            order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        whole = self.length // self.global_batch * self.global_batch
        # [batches of parts, pieces, rows of a rank]
        rows = order[:whole].view(-1, self.pieces, self.batch_size // self.micro_batches)
        return iter(rows[:, self.index].flatten().tolist())

    def __len__(self) -> int:
        return self.length // self.global_batch * self.batch_size

    def whole(self, batch: Any) -> Any:
        """The global batch that this rank's rows are of: its tensors as DTensors; without processes, as they are.

        For a step with micro-batches a tensor becomes a `CutBatch` of DTensors, which the step alone takes.

        Args:
            batch: a pytree of what the loader gave: tensors of `batch_size` rows, and whatever else.

        Raises:
            TraceError: a tensor has another number of rows.
        """
        return pytree.tree_map_only(torch.Tensor, self._whole, batch)

    def _whole(self, rows: torch.Tensor) -> torch.Tensor | CutBatch:
        if rows.dim() == 0 or rows.shape[0] != self.batch_size:
            raise TraceError(
                f"whole(...): a tensor of shape={list(rows.shape)} is no part of a batch, of which this rank has "
                f"{self.batch_size} rows: load with DataLoader(dataset, sampler=rows, batch_size=rows.batch_size)."
            )
        if self.layout is None:
            return rows
        mesh, placements = self.layout.device_mesh, self.layout.placements
        local = rows.to(mesh.device_type).chunk(self.micro_batches)
        parts = tuple(DTensor.from_local(part, mesh, placements, run_check=False) for part in local)
        return parts[0] if self.micro_batches == 1 else CutBatch(parts)


def sampler(dataset: Sized, sharded: ShardedModule | TrainStep, *, shuffle: bool = True, seed: int = 0) -> RankSampler:
    """What of a dataset this rank loads, by the plan of what `compile` gave: its rows of each batch, as on one device.

    Where ranks share a batch out by other dims, or the plan splits inputs differently, each loads all rows.

    Args:
        dataset: as for `torch.utils.data.DataLoader`, with a length.
        sharded: compiled for the batch that a step takes (`example_inputs=`, or called once).
        shuffle, seed: see `RankSampler`.

    Raises:
        TraceError: it is not what `compile` gave, or nothing has been compiled yet.
        NotAvailableError: the dataset has no length, or fewer samples than a batch; inputs have no batch in common; the
            model is a pipeline, whose ranks read inputs on meshes of their own.

    Example:
        >>> import autoshard
        >>> model, mesh = torch.nn.Linear(4, 2), autoshard.Mesh({"data": 2})
        >>> dataset = torch.randn(20, 4)
        >>> sharded = autoshard.compile(model, mesh, example_inputs=(dataset[:8],))
        >>> rows = sampler(dataset, sharded, shuffle=False)  # no processes: all ranks are here
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=rows.batch_size, sampler=rows)
        >>> [tuple(sharded(rows.whole(batch)).shape) for batch in loader]
        [(8, 2), (8, 2)]
    """
    module = sharded.sharded if isinstance(sharded, TrainStep) else sharded
    if not isinstance(module, ShardedModule):
        raise TraceError(f"sampler(...): a {type(module).__name__} is not compiled; pass what autoshard.compile gave.")
    if module.program is None:
        raise TraceError("sampler(...): nothing has been compiled yet; call the model once, or pass example_inputs=.")
    if module.program.staged is not None:
        raise NotAvailableError(
            f"sampler(...): {module.mesh} cuts the model into stages, which read inputs on meshes of their own. Pass "
            "whole batches, the same on all ranks."
        )
    parts = sharded.micro_batches if isinstance(sharded, TrainStep) else 1
    slots = [item for item in module.program.phased.lowered.inputs if item.slot.kind is InputKind.INPUT]
    rows = _batch_of(slots)
    batch = rows * parts
    if not isinstance(dataset, Sized) or len(dataset) < batch:
        found = f"{len(dataset)} samples" if isinstance(dataset, Sized) else "no length"
        raise NotAvailableError(f"sampler(...): the dataset has {found}, and a batch {batch} rows.")
    engine = module.engine
    if not isinstance(engine, DistributedEngine):
        return RankSampler(len(dataset), batch, shuffle=shuffle, seed=seed)
    axes = _axes_of(slots, rows, module.mesh)
    index = 0
    for axis in axes:
        index = index * module.mesh.axis_size(axis) + engine.groups.coordinates[axis]
    layout = Layout(engine.device_mesh, PartitionSpec(axes).to_placements(module.mesh))
    pieces = module.mesh.shards(axes)
    return RankSampler(
        len(dataset),
        batch,
        pieces=pieces,
        index=index,
        micro_batches=parts,
        shuffle=shuffle,
        seed=seed,
        layout=layout,
    )


def _batch_of(slots: list[LocalSlot]) -> int:
    """The first dim of all inputs."""
    sizes = {item.shape[0] if item.shape else None for item in slots}
    size = next(iter(sizes), None)
    if len(sizes) != 1 or size is None:
        shapes = ", ".join(f"{item.slot.name} {list(item.shape)}" for item in slots)
        raise NotAvailableError(
            f"sampler(...): the first dim of every input is the batch, but they are {shapes or 'none'}. Pass whole "
            "batches."
        )
    return size


def _axes_of(slots: list[LocalSlot], batch: int, mesh: Mesh) -> tuple[str, ...]:
    """The axes that cut the rows of every input alike, evenly, and in the mesh's order, as DTensor does."""
    found = {item.spec.axes_of(0) for item in slots}
    axes = next(iter(found)) if len(found) == 1 else ()
    in_order = sorted(axes, key=mesh.axis_names.index) == list(axes)
    return axes if in_order and batch % mesh.shards(axes) == 0 else ()
