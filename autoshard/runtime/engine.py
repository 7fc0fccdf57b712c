"""Engines: where the ranks of a lowered program run.

An engine holds *local values*. In one process per rank that is the rank's tensor; in the simulator it is a
list of tensors, one per rank. A local value has the padded local shape of its spec (see
`autoshard.ir.spec`). The boundary between local values and what a user holds (parameters, inputs, results)
is the engine's too, and nothing but an engine knows which kind of value it has at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import fx, nn

from autoshard.errors import MeshError
from autoshard.ir.boundary import shard_all, unshard
from autoshard.ir.lowered import LocalSlot
from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.agreement.control_group import ControlGroup, Facts
from autoshard.runtime.parameters import give_buffers_memory, memory_of, swap_parameter
from autoshard.runtime.simulator import simulate

T = TypeVar("T")

LocalValue = Any
"""`torch.Tensor` in a process of its own; `list[torch.Tensor]`, one per rank, in the simulator."""

NOTHING: Mapping[int, int] = MappingProxyType({})
NO_HOLDERS: Mapping[str, int] = MappingProxyType({})

Loaded = Callable[[list[LocalValue]], tuple[LocalValue, ...]]
"""A graph made ready to run: local values of its placeholders to local values of its results."""

Reader = Callable[[Sequence[torch.Tensor]], list[LocalValue]]
"""What users hold to local values, in the order of some slots."""

LikeWriter = Callable[[Sequence[LocalValue], Sequence[torch.Tensor | None]], list[torch.Tensor | None]]
"""Local values, in the order of some slots, to tensors that are as others; None where there is no other."""


class Engine(Protocol):
    """Where programs run. Every method that communicates is called by all ranks, in the same order."""

    @property
    def mesh(self) -> Mesh:
        """The mesh whose ranks run."""
        ...

    @property
    def device(self) -> torch.device:
        """The device on which values live."""
        ...

    @property
    def control(self) -> ControlGroup | None:
        """The processes that run the mesh together; None where one runs it alone."""
        ...

    def load(self, graph_module: fx.GraphModule, written: Mapping[int, int] = NOTHING) -> Loaded:
        """Make a lowered graph ready to run; the graph itself is not changed.

        What it gives takes its list of values over and empties it, so that each value is freed after its last use.

        Args:
            graph_module: the graph.
            written: index of a result to that of the placeholder which nobody needs afterwards: the result may be
                written over it. What then becomes of both is for `store`.
        """
        ...

    def store(self, tensors: Sequence[torch.Tensor], values: Sequence[LocalValue], slots: Sequence[LocalSlot]) -> None:
        """Give each tensor, which a user holds, the local value that stands for what its slot says; in place."""
        ...

    def zeros(self, slot: LocalSlot, beside: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor of zeros for a user to hold, that lies as `slot` says, on the ranks that hold parameter `beside`."""
        ...

    def reshard(self, value: LocalValue, source: LocalSlot, target: LocalSlot) -> LocalValue:
        """A local value that lies as one slot says, lying as another does."""
        ...

    def lay_out(self, tensor: torch.Tensor, slot: LocalSlot) -> torch.Tensor:
        """`tensor`, which lies as `slot` says, or else a tensor with its value that does."""
        ...

    def lay_out_like(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A tensor with the value of `tensor`, which is whole, that lies as `like` does."""
        ...

    def add(self, sums: list[LocalValue], addends: list[LocalValue], owned: Sequence[bool] | None = None) -> None:
        """Add `addends`, which is emptied, to `sums`, pairs of local values under one spec.

        Args:
            sums: sums, or addends of sums.
            addends: what is added to each.
            owned: which of `sums`, results of a graph, may be written over as that says; None: all, as they were made
                here.
        """
        ...

    def read(self, tensor: torch.Tensor, slot: LocalSlot) -> LocalValue:
        """The local value of what a user holds: a global tensor, or a DTensor."""
        ...

    def reader(self, slots: Sequence[LocalSlot]) -> Reader:
        """A function that does `read` for each slot; a value may be the very tensor that a DTensor holds."""
        ...

    def like_writer(self, slots: Sequence[LocalSlot]) -> LikeWriter:
        """A function that does `write_like` for each slot; None for a value that is like none."""
        ...

    def write(self, value: LocalValue, slot: LocalSlot) -> torch.Tensor:
        """The global tensor of a local value."""
        ...

    def write_sharded(self, value: LocalValue, slot: LocalSlot) -> torch.Tensor:
        """The tensor of a local value that stays where it lies: a DTensor with processes, else a global tensor."""
        ...

    def write_like(self, value: LocalValue, slot: LocalSlot, like: torch.Tensor) -> torch.Tensor:
        """The tensor of a local value, as `like` is: a DTensor with its placements, else a global tensor."""
        ...

    def adopt(self, model: nn.Module) -> None:
        """Take over the parameters of `model`, before it is known how they will lie."""
        ...

    def has_adopted(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is one that was taken over."""
        ...

    def place(
        self, model: nn.Module, specs: Mapping[str, PartitionSpec], holders: Mapping[str, int] = NO_HOLDERS
    ) -> None:
        """Lay the parameters of `model` out as `specs` (by qualified name) say, keeping their identity.

        What is on the meta device gets memory, filled with zeros.

        Args:
            model: the user's.
            specs: how each lies on the ranks that hold it.
            holders: of each parameter, the place of the pipeline whose ranks alone hold it; empty: every rank has its
                part of all.
        """
        ...

    def global_copy(self, tensor: torch.Tensor, holder: int | None = None) -> torch.Tensor:
        """A plain tensor with the global value and shape of a parameter, buffer or input.

        Args:
            tensor: what a user holds.
            holder: the place of the pipeline whose ranks alone hold it; None: every rank has its part.
        """
        ...

    def gather_region(self, tensor: torch.Tensor, region: tuple[slice, ...], holder: int | None = None) -> torch.Tensor:
        """As `global_copy`, but of a region of the tensor, with memory for little more than that."""
        ...

    def agree(self, facts: Callable[[], Facts]) -> None:
        """Raise `RankMismatchError` on every rank unless all ranks hold the same `facts`."""
        ...

    def share(self, compute: Callable[[], T]) -> T:
        """What `compute` gives on the first rank, on every rank; an error of it is raised on every rank."""
        ...


@dataclass(frozen=True, slots=True)
class SimulatorEngine:
    """All ranks of `mesh` in this process, in lock-step. Parameters stay the user's own."""

    mesh: Mesh
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def control(self) -> None:
        """See `Engine`."""
        return None

    def load(self, graph_module: fx.GraphModule, written: Mapping[int, int] = NOTHING) -> Loaded:
        """See `Engine`: here results are new tensors."""

        def run(values: list[LocalValue]) -> tuple[LocalValue, ...]:
            inputs = values.copy()
            values.clear()
            return tuple(simulate(graph_module, self.mesh, inputs))

        return run

    def read(self, tensor: torch.Tensor, slot: LocalSlot) -> LocalValue:
        """See `Engine`."""
        if tuple(tensor.shape) != slot.shape:
            raise MeshError(f"{slot.slot.name} has shape={tuple(tensor.shape)}, but the program expects {slot.shape}.")
        return shard_all(tensor.detach(), slot.spec, self.mesh)

    def reader(self, slots: Sequence[LocalSlot]) -> Reader:
        """See `Engine`."""
        return lambda tensors: [self.read(tensor, slot) for tensor, slot in zip(tensors, slots, strict=True)]

    def like_writer(self, slots: Sequence[LocalSlot]) -> LikeWriter:
        """See `Engine`."""
        return lambda values, likes: [
            None if like is None else self.write_like(value, slot, like)
            for value, slot, like in zip(values, slots, likes, strict=True)
        ]

    def write(self, value: LocalValue, slot: LocalSlot) -> torch.Tensor:
        """See `Engine`."""
        return unshard(value, slot.spec, self.mesh, slot.shape)

    def write_sharded(self, value: LocalValue, slot: LocalSlot) -> torch.Tensor:
        """See `Engine`."""
        return self.write(value, slot)

    def write_like(self, value: LocalValue, slot: LocalSlot, like: torch.Tensor) -> torch.Tensor:
        """See `Engine`."""
        return self.write(value, slot)

    @torch.no_grad()
    def store(self, tensors: Sequence[torch.Tensor], values: Sequence[LocalValue], slots: Sequence[LocalSlot]) -> None:
        """See `Engine`."""
        for tensor, value, slot in zip(tensors, values, slots, strict=True):
            tensor.copy_(self.write(value, slot))

    def zeros(self, slot: LocalSlot, beside: torch.Tensor | None = None) -> torch.Tensor:
        """See `Engine`."""
        return torch.zeros(slot.shape, dtype=slot.dtype, device=self.device)

    def reshard(self, value: LocalValue, source: LocalSlot, target: LocalSlot) -> LocalValue:
        """See `Engine`."""
        if source.spec == target.spec:
            return value
        return shard_all(unshard(value, source.spec, self.mesh, source.shape), target.spec, self.mesh)

    def lay_out(self, tensor: torch.Tensor, slot: LocalSlot) -> torch.Tensor:
        """See `Engine`: all tensors lie alike here."""
        return tensor

    def lay_out_like(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """See `Engine`: all tensors lie alike here."""
        return tensor

    def add(self, sums: list[LocalValue], addends: list[LocalValue], owned: Sequence[bool] | None = None) -> None:
        """See `Engine`: here sums are new tensors; copies are added once."""
        for index in range(len(sums)):
            sums[index] = _sums(sums[index], addends.pop(0))

    def adopt(self, model: nn.Module) -> None:
        """See `Engine`: the simulator leaves parameters as they are."""

    def has_adopted(self, parameter: torch.Tensor) -> bool:
        """See `Engine`: the simulator takes all as they are."""
        return True

    def place(
        self, model: nn.Module, specs: Mapping[str, PartitionSpec], holders: Mapping[str, int] = NO_HOLDERS
    ) -> None:
        """See `Engine`: the simulator leaves parameters as they are, but for those on the meta device."""
        for parameter in model.parameters():
            if parameter.is_meta:
                swap_parameter(parameter, partial(memory_of, device=self.device))
        give_buffers_memory(model, self.device)

    def global_copy(self, tensor: torch.Tensor, holder: int | None = None) -> torch.Tensor:
        """See `Engine`."""
        return tensor.detach()

    def gather_region(self, tensor: torch.Tensor, region: tuple[slice, ...], holder: int | None = None) -> torch.Tensor:
        """See `Engine`."""
        return tensor.detach()[region]

    def agree(self, facts: Callable[[], Facts]) -> None:
        """See `Engine`: one process agrees with itself."""

    def share(self, compute: Callable[[], T]) -> T:
        """See `Engine`."""
        return compute()


def _sums(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    made: dict[tuple[int, int], torch.Tensor] = {}
    for one, two in zip(first, second, strict=True):
        if (id(one), id(two)) not in made:
            made[id(one), id(two)] = one + two
    return [made[id(one), id(two)] for one, two in zip(first, second, strict=True)]
