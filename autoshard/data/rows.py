"""`RankRows`: the rows of each batch that this rank loads, and their form in a call.

A step with micro-batches runs the program of one size. The last batch of an epoch may have fewer rows, and no equal
parts. The batch is cut so that all its micro-batches have this size, and each row counts once:

1. The batch fills some whole micro-batches.
2. The rows that are left are cut into runs, each as long as the largest divisor of the size that fits. A run of length
   size / c is repeated: each of its rows occurs c times in a micro-batch, whose sums are divided by c.
3. Micro-batches of weight zero fill the last round of the step's order.

A step without micro-batches has one micro-batch. If no plan, recipe or constraint fixes the batch size of this step,
the last batch runs a program of its own size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils import _pytree as pytree

from autoshard.errors import NotAvailableError, TraceError
from autoshard.ir.lowered import LocalSlot
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import InputKind
from autoshard.ir.request import CompiledProgram
from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.distributed import DistributedEngine
from autoshard.runtime.micro_batches import CutBatch
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Layout:
    """Placement of this process's rows as a DTensor: the `placements` on `device_mesh`."""

    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class RowRun:
    """Consecutive rows of a batch, which one micro-batch computes with; see the file's docstring.

    Args:
        start, stop: the first row in the batch, and the row after the last one.
        copies: how many times each row occurs in the micro-batch.
    """

    start: int
    stop: int
    copies: int = 1


@dataclass(frozen=True, slots=True)
class RankRows:
    """The rows of each batch that this rank loads.

    Args:
        batch: rows of a whole batch on all ranks.
        micro_batches: number of micro-batches of a whole batch; it divides `batch`.
        sizes: number of pieces into which rows are split along each mesh axis that splits them; outermost axis first.
        place: number of this rank's piece along each of these axes.
        layout: placement of this rank's rows; None if this process has all rows.
        device: the device of the program's inputs.
        repeats: whether a batch of fewer rows runs the program of `batch` rows, in micro-batches in which rows are
            repeated. Only a step can do this. Otherwise such a batch runs a program of its own size.
    """

    batch: int
    micro_batches: int = 1
    sizes: tuple[int, ...] = ()
    place: tuple[int, ...] = ()
    layout: Layout | None = None
    device: torch.device = CPU
    repeats: bool = True

    def runs(self, count: int) -> list[RowRun]:
        """Return the rows of each micro-batch, for a batch of `count` rows. Micro-batches of weight zero are left out.

        Example:
            >>> RankRows(8, micro_batches=2).runs(7)
            [RowRun(start=0, stop=4, copies=1), RowRun(start=4, stop=6, copies=2), RowRun(start=6, stop=7, copies=4)]
        """
        if not self.repeats:
            return [RowRun(0, count)]
        size, found, start = self.batch // self.micro_batches, [], 0
        while start < count:
            longest = next(each for each in range(min(size, count - start), 0, -1) if size % each == 0)
            found.append(RowRun(start, start + longest, size // longest))
            start += longest
        return found

    def of(self, count: int) -> list[int]:
        """Return the rows that this rank loads from a batch of `count` rows: their numbers in the batch, in order.

        A rank without rows loads the first row, from which `whole` makes tensors without rows.
        """
        return [run.start + place // run.copies for run in self.runs(count) for place in self.places(run)] or [0]

    def places(self, run: RowRun) -> range:
        """Return the part of a run's micro-batch that this rank computes with, as a range of indices.

        The micro-batch has each row of the run `run.copies` times, one copy behind the other.
        """
        rows = range((run.stop - run.start) * run.copies)
        for size, place in zip(self.sizes, self.place, strict=True):
            piece = -(-len(rows) // size)  # as torch cuts a DTensor
            rows = rows[place * piece : (place + 1) * piece]
        return rows

    def whole(self, batch: Any, count: int, hint: str) -> Any:
        """Return a batch of `count` rows as DTensors of this rank's rows; without processes, the rows themselves.

        For a step with micro-batches a tensor becomes a `CutBatch`.

        Args:
            batch: a pytree of the loaded rows: tensors of `len(self.of(count))` rows, and other values.
            count: rows of the batch on all ranks.
            hint: the way out, for the message of an error.

        Raises:
            TraceError: a tensor has another number of rows.
        """
        if isinstance(batch, Mapping):
            batch = dict(batch)  # a type that pytree does not know, such as BatchEncoding
        runs = self.runs(count)
        loaded = sum(len(self.places(run)) for run in runs) or 1
        for rows in pytree.tree_leaves(batch):
            if isinstance(rows, torch.Tensor) and (rows.dim() == 0 or rows.shape[0] != loaded):
                raise TraceError(
                    f"whole(...): a tensor of shape={list(rows.shape)} is no part of a batch, of which this rank has "
                    f"{loaded} rows: {hint}."
                )
        return pytree.tree_map_only(torch.Tensor, partial(self._whole, runs=runs), batch)

    def _whole(self, rows: torch.Tensor, runs: Sequence[RowRun]) -> torch.Tensor | CutBatch:
        rows, own = rows.to(self.device, non_blocking=True), [len(self.places(run)) for run in runs]
        if not any(own):
            rows = rows[:0]
        is_one = not self.repeats or runs == [RowRun(0, self.batch)]
        if self.layout is None and (is_one or runs[-1].stop == self.batch):
            return rows  # the step cuts the batch
        parts = [self._part(part, run) for part, run in zip(rows.split(own), runs, strict=True)]
        if is_one:
            return parts[0]
        copies, missing = [run.copies for run in runs], -len(runs) % self.micro_batches
        return CutBatch((*parts, *parts[:1] * missing), (*copies, *[0] * missing))

    def _part(self, rows: torch.Tensor, run: RowRun) -> torch.Tensor:
        if self.layout is None:
            return rows
        shape = ((run.stop - run.start) * run.copies, *rows.shape[1:])
        stride = torch.empty(shape, device="meta").stride()
        mesh, placements = self.layout.device_mesh, self.layout.placements
        return DTensor.from_local(rows, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def module_of(sharded: Any, asker: str) -> ShardedModule:
    """Return the module of a result of `compile`; `asker` is the user's call, for messages.

    Raises:
        TraceError: `sharded` is not a result of `compile`.
    """
    module = sharded.sharded if isinstance(sharded, TrainStep) else sharded
    if not isinstance(module, ShardedModule):
        raise TraceError(f"{asker}: a {type(module).__name__} is not compiled; pass the result of autoshard.compile.")
    return module


def micro_batches_of(sharded: ShardedModule | TrainStep) -> int:
    """Return the number of micro-batches into which a step cuts a batch; 1 for a module."""
    return sharded.micro_batches if isinstance(sharded, TrainStep) else 1


def rows_of(
    module: ShardedModule, program: CompiledProgram, micro_batches: int, asker: str, *, repeats: bool = True
) -> RankRows:
    """Return the rows of each batch that this rank loads by the plan of a program.

    Args:
        module: the module of the program.
        program: the program of one micro-batch. In pipeline stages each rank loads whole batches.
        micro_batches: number of micro-batches of a batch.
        asker: the user's call, for messages.
        repeats: see `RankRows`.

    Raises:
        NotAvailableError: the inputs have no common batch.
    """
    slots = _inputs_of(program)
    rows = batch_of(program)
    if rows is None:
        shapes = ", ".join(f"{item.slot.name} {list(item.shape)}" for item in slots)
        raise NotAvailableError(
            f"{asker}: the first dim of every input is the batch, but they are {shapes or 'none'}. Pass whole batches."
        )
    engine, batch = module.engine, rows * micro_batches
    if not isinstance(engine, DistributedEngine) or program.staged is not None:
        return RankRows(batch, micro_batches, device=engine.device, repeats=repeats)
    axes = _axes_of(slots, rows, module.mesh)
    return RankRows(
        batch,
        micro_batches,
        tuple(map(module.mesh.axis_size, axes)),
        tuple(engine.groups.coordinates[axis] for axis in axes),
        Layout(engine.device_mesh, PartitionSpec(axes).to_placements(module.mesh)),
        engine.device,
        repeats,
    )


def batch_of(program: CompiledProgram) -> int | None:
    """Return the common size of dim 0 of a program's inputs; None if there is no common size."""
    sizes = {item.shape[0] if item.shape else None for item in _inputs_of(program)}
    return next(iter(sizes)) if len(sizes) == 1 else None


def order_of(length: int, epoch: int, *, shuffle: bool, seed: int) -> torch.Tensor:
    """Return the indices of all samples in the order of an epoch, the same on all ranks."""
    if not shuffle:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))


def _inputs_of(program: CompiledProgram) -> list[LocalSlot]:
    return [item for item in program.phased.lowered.inputs if item.slot.kind is InputKind.INPUT]


def _axes_of(slots: list[LocalSlot], batch: int, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes that split dim 0 of every input, major to minor.

    Empty if two inputs have different splits, a split is uneven, or DTensor cannot have the axes in this order.
    """
    found = {item.spec.axes_of(0) for item in slots}
    axes = next(iter(found)) if len(found) == 1 else ()
    in_order = sorted(axes, key=mesh.axis_names.index) == list(axes)
    return axes if in_order and batch % mesh.shards(axes) == 0 else ()
