"""Load only the rows that a rank computes with: `autoshard.data.sampler`.

By default each rank passes the whole batch and computes its part. With a sampler, a rank loads only its own rows, and
passes them as a DTensor, which the program reads in place.
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
    """Placement of this process's rows as a DTensor: the `placements` on `device_mesh`."""

    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]


class RankSampler(Sampler[int]):
    """This rank's rows of each global batch, in the batch's order. Made by `sampler`.

    Args:
        length: samples of the dataset. Samples behind the last whole batch are not drawn.
        global_batch: samples of a batch on all ranks.
        pieces: number of equal pieces into which the ranks divide each micro-batch.
        index: number of this rank's piece.
        micro_batches: number of equal parts of a batch, run one after another. This rank has rows in every part.
        shuffle: draw each epoch in another random order, the same on all ranks.
        seed: seed of the random order.
        layout: placement of the DTensors that `whole` makes of this rank's rows; None if this rank has the whole batch.
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
        """Rows of a step's batch that this rank loads: for `DataLoader(dataset, batch_size=..., sampler=...)`."""
        return self.global_batch // self.pieces

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which with `seed` determines the random order. Call it before each epoch, on all ranks."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.length)
        if self.shuffle:
            order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        whole = self.length // self.global_batch * self.global_batch
        # [micro-batches of all batches, pieces, rows of a piece]
        rows = order[:whole].view(-1, self.pieces, self.batch_size // self.micro_batches)
        return iter(rows[:, self.index].flatten().tolist())

    def __len__(self) -> int:
        return self.length // self.global_batch * self.batch_size

    def whole(self, batch: Any) -> Any:
        """Return the global batch as DTensors of this rank's rows; without processes, the rows themselves.

        For a step with micro-batches, each tensor becomes a `CutBatch`, with one DTensor for each micro-batch. Only the
        step can read a `CutBatch`.

        Args:
            batch: a pytree from the loader: tensors of `batch_size` rows, and other values.

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
    """Return a sampler of the rows that this rank needs by the plan of `sharded`.

    The rows of all ranks together are the batch that one device would load. If the plan splits inputs by another dim
    than the first, or two inputs have different splits, each rank loads all rows.

    Args:
        dataset: a dataset for `torch.utils.data.DataLoader`, with a length.
        sharded: result of `compile` for the batch of a step: pass `example_inputs=`, or call it once.
        shuffle: draw each epoch in another random order, the same on all ranks.
        seed: seed of the random order.

    Raises:
        TraceError: `sharded` is not a result of `compile`, or nothing is compiled yet.
        NotAvailableError: the dataset has no length or is smaller than a batch; or the inputs have no common batch; or
            the model is a pipeline.

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
        raise TraceError(
            f"sampler(...): a {type(module).__name__} is not compiled; pass the result of autoshard.compile."
        )
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
        raise NotAvailableError(
            f"sampler(...): the dataset has {found}, and a batch {batch} rows. Pass a dataset with __len__, of at "
            "least one batch, or compile for a smaller batch."
        )
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
    """Return the axes that split dim 0 of every input, major to minor.

    Empty if two inputs have different splits, a split is uneven, or DTensor cannot have the axes in this order.
    """
    found = {item.spec.axes_of(0) for item in slots}
    axes = next(iter(found)) if len(found) == 1 else ()
    in_order = sorted(axes, key=mesh.axis_names.index) == list(axes)
    return axes if in_order and batch % mesh.shards(axes) == 0 else ()
