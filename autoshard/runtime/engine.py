"""Engines, which run the ranks of lowered programs on *local values*, and convert these from and to the user's tensors.

With one process per rank, a local value is the rank's tensor. In the simulator, it is a list of tensors, one per rank.
It has the padded local shape of its spec (`autoshard.ir.spec`). No code outside the engines looks into local values. A
slot (`LocalSlot`) is an input or result of a program, with its name, spec, global shape and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import fx, nn

from autoshard.errors import MeshError
from autoshard.graphs.name_ranges import phase_of, range_name
from autoshard.ir.boundary import shard_all, unshard
from autoshard.ir.cost_errors import errors_of_ours
from autoshard.ir.lowered import LocalSlot
from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import PartitionSpec
from autoshard.runtime.agreement.control_group import ControlGroup, Facts
from autoshard.runtime.parameters import give_buffers_memory, memory_of, swap_parameter
from autoshard.runtime.profiling.ranges import Ranges
from autoshard.runtime.simulator import Around, simulate

T = TypeVar("T")

LocalValue = Any
"""With a process per rank, this rank's `torch.Tensor`; in the simulator a `list[torch.Tensor]`, one for each rank."""

NOTHING: Mapping[int, int] = MappingProxyType({})
NO_PIPELINE_RANKS: Mapping[str, int] = MappingProxyType({})

Loaded = Callable[[list[LocalValue]], tuple[LocalValue, ...]]
"""A graph that is ready to run: a function from local values of its placeholders to local values of its results."""

Reader = Callable[[Sequence[torch.Tensor]], list[LocalValue]]
"""Function from the user's tensors to local values; both are in the order of the slots for which it was made."""

LikeWriter = Callable[[Sequence[LocalValue], Sequence[torch.Tensor | None]], list[torch.Tensor | None]]
"""Function from local values to tensors that are sharded like given tensors (`Engine.write_like`).

The arguments are the local values, and for each value a given tensor or None. Both are in the order of the slots for
which the function was made. None gives the result None.
"""


class Engine(Protocol):
    """Runs programs on the ranks of a mesh.

    All ranks must call every method that communicates, in the same order.
    """

    @property
    def mesh(self) -> Mesh:
        """The mesh on which a program runs. With a pipeline, it is a stage's mesh, without the axis "pipeline"."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of this process's local values."""
        ...

    @property
    def control(self) -> ControlGroup | None:
        """The ranks that compare calls and programs; None if one process runs the mesh alone."""
        ...

    @property
    def ranges(self) -> Ranges:
        """The switch that makes programs mark their named ranges for profiles."""
        ...

    def load(self, graph_module: fx.GraphModule, written: Mapping[int, int] = NOTHING) -> Loaded:
        """Make a lowered graph ready to run; the graph itself is not changed.

        The returned function takes a list of values and empties it, so that each value is freed after its last use.

        Args:
            graph_module: the lowered graph.
            written: index of a result → index of the placeholder whose value it replaces. The returned function may
                write the result over this value, or leave the value alone. In both cases, the caller must pass the
                results to this engine's `store`.
        """
        ...

    def load_adding(self, graph_module: fx.GraphModule, owned: Sequence[bool]) -> Loaded | None:
        """Return a function that runs a graph and adds its last results to running sums (see `add_to_sums`).

        The function takes the sums after the graph's own inputs. The method returns None if this engine cannot add
        while the graph runs. The caller then calls `add` on the results of the graph.

        `owned` says, for each of the last results, whether the graph makes it in new memory. The first micro-batch's
        results become the first sums. If they are in new memory, later sums may be written over them.
        """
        ...

    def store(self, tensors: Sequence[torch.Tensor], values: Sequence[LocalValue], slots: Sequence[LocalSlot]) -> None:
        """Write local values into the user's tensors, in place; each local value has the spec of its slot."""
        ...

    def zeros(self, slot: LocalSlot, beside: torch.Tensor | None = None) -> torch.Tensor:
        """Return a DTensor of zeros with the slot's global shape, dtype and sharding; in the simulator, a whole tensor.

        The tensor is on the ranks that hold the parameter `beside`; None: on the ranks of this engine's mesh.
        """
        ...

    def reshard(self, value: LocalValue, source: LocalSlot, target: LocalSlot) -> LocalValue:
        """Return a local value with the spec of `source` as a local value with the spec of `target`."""
        ...

    def lay_out(self, tensor: torch.Tensor, slot: LocalSlot) -> torch.Tensor:
        """Return `tensor` itself if it has the sharding of `slot`; else return a copy with this sharding."""
        ...

    def lay_out_like(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return a copy of the whole tensor `tensor`, sharded like the DTensor `like`.

        If `like` is a plain tensor, return `tensor` itself.
        """
        ...

    def add(self, sums: list[LocalValue], addends: list[LocalValue], owned: Sequence[bool] | None = None) -> None:
        """Add each of `addends` to the sum at the same position in `sums`; empty the list `addends`.

        Args:
            sums: local values: the sums so far, or the first addends. The list gets the new sums.
            addends: a local value for each sum, with the same spec.
            owned: for each sum, whether `add` may write over the sum. None: it may write over all sums, because an
                earlier `add` made them.
        """
        ...

    def read(self, tensor: torch.Tensor, slot: LocalSlot) -> LocalValue:
        """Return the local value, with the spec of `slot`, of a user's tensor (a global tensor or a DTensor)."""
        ...

    def reader(self, slots: Sequence[LocalSlot]) -> Reader:
        """Return a function that applies `read` to a tensor of each slot. Results may share memory with DTensors."""
        ...

    def like_writer(self, slots: Sequence[LocalSlot]) -> LikeWriter:
        """Return a function that applies `write_like` to a local value for each slot."""
        ...

    def write(self, value: LocalValue, slot: LocalSlot) -> torch.Tensor:
        """Gather a local value, and return the whole, global tensor."""
        ...

    def write_sharded(self, value: LocalValue, slot: LocalSlot) -> torch.Tensor:
        """Return a local value as a DTensor, without gathering it. The simulator returns a global tensor."""
        ...

    def write_like(self, value: LocalValue, slot: LocalSlot, like: torch.Tensor) -> torch.Tensor:
        """Return a local value as a DTensor with the placements of `like`, or whole if `like` is a plain tensor."""
        ...

    def adopt(self, model: nn.Module) -> None:
        """Take over the parameters of `model`, before their sharding is known. With processes, they become DTensors."""
        ...

    def has_adopted(self, parameter: torch.Tensor) -> bool:
        """Whether this parameter was in a model when `adopt` took the model's parameters over."""
        ...

    def place(
        self,
        model: nn.Module,
        specs: Mapping[str, PartitionSpec],
        pipeline_rank_of: Mapping[str, int] = NO_PIPELINE_RANKS,
    ) -> None:
        """Shard the parameters of `model` by `specs`. The parameter objects stay the same.

        Parameters and buffers on the meta device get memory, filled with zeros.

        Args:
            model: the user's model.
            specs: parameter's qualified name → its spec on the ranks that hold it.
            pipeline_rank_of: parameter's name → the pipeline rank (index along the axis "pipeline") that alone holds
                it. Empty: every rank has its shard of all parameters.
        """
        ...

    def global_copy(self, tensor: torch.Tensor, pipeline_rank: int | None = None) -> torch.Tensor:
        """Return the whole value of a parameter, buffer or input as a plain tensor.

        `pipeline_rank` alone holds the tensor; None: every rank has its shard.
        """
        ...

    def gather_region(
        self, tensor: torch.Tensor, region: tuple[slice, ...], pipeline_rank: int | None = None
    ) -> torch.Tensor:
        """Return `region` of the tensor that `global_copy` returns, with little more memory than the region takes."""
        ...

    def agree(self, facts: Callable[[], Facts]) -> None:
        """Raise `RankMismatchError` on every rank if the ranks' `facts` differ."""
        ...

    def share(self, compute: Callable[[], T]) -> T:
        """Run `compute` on the first rank only, and return its result or raise its error on every rank."""
        ...


@dataclass(frozen=True, slots=True)
class SimulatorEngine:
    """Runs all ranks of `mesh` in this process, in lock-step. The user's parameters stay whole, plain tensors."""

    mesh: Mesh
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ranges: Ranges = field(default_factory=Ranges, compare=False)

    @property
    def control(self) -> None:
        return None

    def load(self, graph_module: fx.GraphModule, written: Mapping[int, int] = NOTHING) -> Loaded:
        """Make a lowered graph ready to run on all ranks. Results are new tensors, whatever `written` says."""

        def run(values: list[LocalValue]) -> tuple[LocalValue, ...]:
            inputs = values.copy()
            values.clear()
            return tuple(simulate(graph_module, self.mesh, inputs, around=self._around(graph_module)))

        return run

    def _around(self, graph_module: fx.GraphModule) -> Around | None:
        """Return a function that puts nodes into ranges; None if the ranges are off. All ranks run in one range."""
        if not self.ranges.are_on:
            return None
        phase = phase_of(graph_module)

        def around(node: fx.Node) -> AbstractContextManager[None]:
            name = range_name(node, phase)
            return self.ranges.around(name) if name else nullcontext()

        return around

    def load_adding(self, graph_module: fx.GraphModule, owned: Sequence[bool]) -> Loaded | None:
        """Return None: ranks may share a tensor, so adding to it would change the values of several ranks."""
        return None

    def read(self, tensor: torch.Tensor, slot: LocalSlot) -> LocalValue:
        if tuple(tensor.shape) != slot.shape:
            raise MeshError(f"{slot.slot.name} has shape={tuple(tensor.shape)}, but the program expects {slot.shape}.")
        return shard_all(tensor.detach(), slot.spec, self.mesh)

    def reader(self, slots: Sequence[LocalSlot]) -> Reader:
        return lambda tensors: [self.read(tensor, slot) for tensor, slot in zip(tensors, slots, strict=True)]

    def like_writer(self, slots: Sequence[LocalSlot]) -> LikeWriter:
        return lambda values, likes: [
            None if like is None else self.write_like(value, slot, like)
            for value, slot, like in zip(values, slots, likes, strict=True)
        ]

    def write(self, value: LocalValue, slot: LocalSlot) -> torch.Tensor:
        return unshard(value, slot.spec, self.mesh, slot.shape)

    def write_sharded(self, value: LocalValue, slot: LocalSlot) -> torch.Tensor:
        return self.write(value, slot)

    def write_like(self, value: LocalValue, slot: LocalSlot, like: torch.Tensor) -> torch.Tensor:
        return self.write(value, slot)

    @torch.no_grad()
    def store(self, tensors: Sequence[torch.Tensor], values: Sequence[LocalValue], slots: Sequence[LocalSlot]) -> None:
        for tensor, value, slot in zip(tensors, values, slots, strict=True):
            tensor.copy_(self.write(value, slot))

    def zeros(self, slot: LocalSlot, beside: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros(slot.shape, dtype=slot.dtype, device=self.device)

    def reshard(self, value: LocalValue, source: LocalSlot, target: LocalSlot) -> LocalValue:
        if source.spec == target.spec:
            return value
        return shard_all(unshard(value, source.spec, self.mesh, source.shape), target.spec, self.mesh)

    def lay_out(self, tensor: torch.Tensor, slot: LocalSlot) -> torch.Tensor:
        """Return `tensor`: the simulator has only whole tensors."""
        return tensor

    def lay_out_like(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return `tensor`: the simulator has only whole tensors."""
        return tensor

    def add(self, sums: list[LocalValue], addends: list[LocalValue], owned: Sequence[bool] | None = None) -> None:
        """Replace each of `sums` by its sum with an addend, in new tensors.

        A pair that several ranks share is added once.
        """
        for index in range(len(sums)):
            sums[index] = _sums(sums[index], addends.pop(0))

    def adopt(self, model: nn.Module) -> None:
        """Do nothing: the simulator leaves parameters as they are."""

    def has_adopted(self, parameter: torch.Tensor) -> bool:
        """Return True: the simulator takes every parameter as it is."""
        return True

    def place(
        self,
        model: nn.Module,
        specs: Mapping[str, PartitionSpec],
        pipeline_rank_of: Mapping[str, int] = NO_PIPELINE_RANKS,
    ) -> None:
        """Give memory to parameters and buffers on the meta device. All other parameters stay as they are."""
        for parameter in model.parameters():
            if parameter.is_meta:
                swap_parameter(parameter, partial(memory_of, device=self.device))
        give_buffers_memory(model, self.device)

    def global_copy(self, tensor: torch.Tensor, pipeline_rank: int | None = None) -> torch.Tensor:
        return tensor.detach()

    def gather_region(
        self, tensor: torch.Tensor, region: tuple[slice, ...], pipeline_rank: int | None = None
    ) -> torch.Tensor:
        return tensor.detach()[region]

    def agree(self, facts: Callable[[], Facts]) -> None:
        """Do nothing: one process agrees with itself."""

    def share(self, compute: Callable[[], T]) -> T:
        with errors_of_ours():
            return compute()


def _sums(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    made: dict[tuple[int, int], torch.Tensor] = {}
    for one, two in zip(first, second, strict=True):
        if (id(one), id(two)) not in made:
            made[id(one), id(two)] = one + two
    return [made[id(one), id(two)] for one, two in zip(first, second, strict=True)]
