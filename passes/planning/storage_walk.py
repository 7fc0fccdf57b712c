"""Storages of a program under one choice: what makes them, gives views of them and uses them, in its order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.ir.program import InputKind, OutputKind
from autoshard.ir.spec import PartitionSpec
from autoshard.kernels.optimizers import IN_PLACE
from autoshard.rules.emit_local import in_order, stride_free
from autoshard.rules.enumeration import Strategy
from autoshard.rules.hub import hub
from passes.memory.elided_lifetimes import Key
from passes.memory.liveness import GRADIENT, UPDATE
from passes.memory.memory_tables import differs, is_on_host, traced_value
from passes.memory.transients import Moved, RewrittenForm, Transients
from passes.planning.build_assignment import PlanningProblem
from passes.preparation.insert_hubs import is_gradient_hub
from passes.strategies.enumerate_strategies import Site, leaves_program
from passes.strategies.price import local_bytes

_PART_OF = {InputKind.PARAMETER: "parameters", InputKind.STATE: "optimizer state"}


@dataclass(slots=True, eq=False)
class Storage:
    """Memory that values lie in, from what made it to its last use so far."""

    key: Key
    part: str
    size: int
    birth: int
    death: int

    def use(self, point: int) -> None:
        """Note a use."""
        self.death = max(self.death, point)


@dataclass(frozen=True, slots=True)
class Local:
    """Where a value lies on each rank.

    Args:
        storage: its memory.
        strides: of the whole value, if its dims lie in memory in another order than they come; a rank's piece has them
            in that order. Not those of the trace behind a reshard, which leaves dims in order.
    """

    storage: Storage
    strides: tuple[int, ...] | None = None

    def lies_like(self, traced: torch.Tensor) -> bool:
        """Whether its dims lie in the order that they have in the trace."""
        return self.strides == (None if traced.is_contiguous() else traced.stride())

    def lying(self, traced: torch.Tensor) -> torch.Tensor:
        """A value like the traced one, which lies like this."""
        if self.lies_like(traced):
            return traced
        whole = torch.empty(traced.shape, dtype=traced.dtype, device="meta")
        return whole if self.strides is None else whole.as_strided(traced.shape, self.strides)


@dataclass(frozen=True, slots=True)
class Reshard:
    """A reshard of a value that lies in a storage."""

    point: int
    storage: Storage
    moved: Moved


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A call that runs another local form, and its operands."""

    site: Site
    form: RewrittenForm
    point: int
    operands: tuple[Local, ...]

    def beside(self, transients: Transients) -> int:
        """Bytes beside operands that are there and results, see `Transients.beside`."""
        given = [operand.storage for operand in self.operands]
        distinct = list(dict.fromkeys(given))
        sizes = tuple(storage.size if storage.death >= self.point else 0 for storage in distinct)
        gone = tuple(storage.death == self.point for storage in distinct)
        return transients.beside(self.form, tuple(map(distinct.index, given)), sizes, gone)


@dataclass(slots=True)
class Walk:
    """Follows the program, and notes what makes a storage and what uses it."""

    planning: PlanningProblem
    choice: Sequence[int]
    storages: dict[Key, Storage] = field(default_factory=dict)
    reshards: list[Reshard] = field(default_factory=list)
    rewritten: list[Rewritten] = field(default_factory=list)
    values: dict[tuple[str, int], Local] = field(default_factory=dict)
    into: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    out_of: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    read: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    kinds: dict[str, InputKind] = field(default_factory=dict)
    differing: dict[tuple[PartitionSpec, PartitionSpec], bool] = field(default_factory=dict)
    is_step: bool = False

    def run(self) -> None:
        """Walk through all sites in order."""
        space = self.planning.space
        self.kinds = {slot.node: InputKind(slot.kind) for slot in space.program.inputs}
        self.is_step = bool(space.program.outputs_of(OutputKind.PARAMETER_UPDATE))
        for index, link in enumerate(space.links):
            leaving = leaves_program(space.sites[link.head], link)
            (self.out_of[link.tail] if leaving else self.into[link.head]).append(index)
            self.read[link.tail].add(link.result)
        for name, site in space.sites.items():
            if site.is_input:
                self._enter(site)
            elif site.node is not None:
                self._call(site)
            for index in self.out_of[name]:
                self._leave(index)
        if self.planning.liveness.micro_batches > 1:
            self._add_sums()

    def local_form(self, site: Site, strategy: Strategy, operands: Sequence[Local]) -> RewrittenForm | None:
        """What a rank runs for a call, without what nothing reads; see `Transients.local_form`."""
        unread = frozenset(range(len(site.results))) - self.read[site.name]
        strided = {index: operand.strides for index, operand in enumerate(operands) if operand.strides is not None}
        return self.planning.memory.transients.local_form(site, strategy, unread, strided)

    def _add_sums(self) -> None:
        """Sums of gradients over micro-batches: that so far, and a new one beside both addends where it must be."""
        for name, point in self.planning.liveness.adding.items():
            size = self._local_bytes(self.planning.space.sites[name], 0)
            self._new((name, "sum so far"), "gradients", size, 0, point)
            if name in self.planning.liveness.added_anew:
                self._new((name, "new sum"), "gradients", size, point, point)

    def _enter(self, site: Site) -> None:
        """An input is there throughout."""
        part = _PART_OF.get(self.kinds[site.name], "inputs")
        size, end = self._local_bytes(site, 0), self.planning.liveness.points - 1
        self.values[site.name, 0] = Local(self._new((site.name, 0), part, size, 0, end))

    def _call(self, site: Site) -> None:
        """Operands are resharded; then the call makes storages for its results, or views what it is given."""
        point = self.planning.liveness.calls[site.name]
        operands = [self._arriving(index) for index in self.into[site.name]]
        strategy = self.planning.strategy(site.name, self.choice)
        form = self.local_form(site, strategy, operands)
        reads = [True] * len(operands) if form is None else form.reads
        for index, operand, is_read in zip(self.into[site.name], operands, reads, strict=True):
            if is_read or operand.storage.key == (index, "copy"):
                operand.storage.use(point)
        if form is not None:
            self.rewritten.append(Rewritten(site, form, point, tuple(operands)))
            made = {number: self._made(site, number, size) for number, size in form.made.items()}
            where = form.results
        elif site.is_alias:
            made, where = {}, _viewed_operands(site)
        else:
            made = {
                n + len(operands): self._made(site, n, self._local_bytes(site, n)) for n in range(len(site.results))
            }
            where = tuple(made)
        for result, number in enumerate(where):
            if number is None:
                continue
            storage = made[number] if number in made else operands[number].storage
            self.values[site.name, result] = Local(storage, self._strides(site, result, operands))
        if is_gradient_hub(site.node):
            _mark_gradient(self.values[site.name, 0].storage)

    def _strides(self, site: Site, result: int, operands: Sequence[Local]) -> tuple[int, ...] | None:
        """How a result lies: as in the trace where operands do, else as views and pointwise calls leave it.

        Other calls give what lies in order there in order, and the rest so if none of their operands is strided.
        """
        if site.node is not None and site.node.target is hub:
            return operands[0].strides
        traced = [_traced_of(self.planning, index) for index in self.into[site.name]]
        found = traced_value(site, result)
        if not all(operand.lies_like(value) for operand, value in zip(operands, traced, strict=True)):
            if _follows_operands(site):
                found = _called_on(
                    site, [operand.lying(value) for operand, value in zip(operands, traced, strict=True)]
                )
            elif not any(operand.strides for operand in operands):
                return None
        return None if found.is_contiguous() else found.stride()

    def _arriving(self, index: int) -> Local:
        """Where a link's value is when it arrives: where it was, or in a copy."""
        reshard = self._reshard(index)
        if reshard is not None:
            return Local(self._copy(index, reshard))
        link = self.planning.space.links[index]
        return self.values[link.tail, link.result]

    def _reshard(self, index: int) -> Reshard | None:
        """The reshard on a link, if there is one; a use of what is resharded."""
        link = self.planning.space.links[index]
        source = self.planning.strategy(link.tail, self.choice).outputs[link.result]
        head = self.planning.strategy(link.head, self.choice)
        target = head.outputs[0] if link.operand < 0 else head.inputs[link.operand]
        if not self._differs(source, target):
            return None
        value = self.values[link.tail, link.result]
        lying = value.lying(_traced_of(self.planning, index))
        moved = Moved(lying, source, target, value.strides is not None, value.storage.size)
        reshard = Reshard(self.planning.liveness.reshards[index], value.storage, moved)
        value.storage.use(reshard.point)
        self.reshards.append(reshard)
        return reshard

    def _differs(self, source: PartitionSpec, target: PartitionSpec) -> bool:
        if (source, target) not in self.differing:
            self.differing[source, target] = bool(differs((source,), (target,), self.planning.space.mesh)[0, 0])
        return self.differing[source, target]

    def _copy(self, index: int, reshard: Reshard) -> Storage:
        size, point = self.planning.memory.transients.bytes_of_copy(reshard.moved), reshard.point + 1
        return self._new((index, "copy"), "activations", size, point, point)

    def _made(self, site: Site, number: int, size: int) -> Storage:
        point = self.planning.liveness.calls[site.name]
        return self._new((site.name, number), "activations", size, point, point)

    def _leave(self, index: int) -> None:
        """A result stays as it is returned; what is updated is written over, so that nothing stays of it."""
        link = self.planning.space.links[index]
        if self.planning.space.sites[link.tail].phase == UPDATE:
            self._reshard(index)
            return
        value = self._arriving(index)
        if self.planning.space.sites[link.head].node is None:
            end = self.planning.liveness.forward_end if self.is_step else self.planning.liveness.points - 1
            value.storage.use(end)
        elif self.kinds[link.head] is InputKind.BUFFER:
            value.storage.use(self.planning.liveness.forward_end)
        else:
            value.storage.use(self.planning.liveness.points - 1)
            _mark_gradient(value.storage)

    def _local_bytes(self, site: Site, result: int) -> int:
        if is_on_host(site):
            return 0
        spec = self.planning.strategy(site.name, self.choice).outputs[result]
        return local_bytes(site.results[result], spec, self.planning.space.mesh)

    def _new(self, key: Key, part: str, size: int, birth: int, death: int) -> Storage:
        self.storages[key] = Storage(key, part, size, birth, death)
        return self.storages[key]


def walk_through(planning: PlanningProblem, choice: Sequence[int]) -> Walk:
    """The walk through a program under one choice."""
    walk = Walk(planning, choice)
    walk.run()
    return walk


def _viewed_operands(site: Site) -> tuple[int, ...]:
    """The operand that each result of a view, or of an update in place, shares its memory with."""
    assert site.node is not None, "results of the program are no calls"
    if site.node.target in IN_PLACE:
        return tuple(number for number in range(len(site.results) + 1) if number != GRADIENT)
    return (0,) * len(site.results)


def _follows_operands(site: Site) -> bool:
    """Whether a call has one result, which lies as its operands say: a view, or a pointwise call."""
    target: Any = site.node.target if site.node is not None else None
    if not isinstance(target, torch._ops.OpOverload) or len(site.results) != 1:
        return False
    if target in IN_PLACE or target is torch.ops.aten.as_strided.default or in_order(target):
        return False
    return site.is_alias or torch.Tag.pointwise in target.tags


def _called_on(site: Site, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of a call on meta tensors that lie as its operands do."""
    assert site.node is not None, "calls have nodes"
    given = iter(operands)

    def operand(argument: fx.Node) -> Any:
        value = argument.meta["val"]
        return next(given).to("meta") if isinstance(value, torch.Tensor) else value

    args, kwargs = fx.map_arg((site.node.args, site.node.kwargs), operand)
    return stride_free(site.node.target)(*args, **kwargs)


def _mark_gradient(storage: Storage) -> None:
    if storage.part == "activations":
        storage.part = "gradients"


def _traced_of(planning: PlanningProblem, index: int) -> torch.Tensor:
    """The value that a link carries, as the trace has it."""
    link = planning.space.links[index]
    return traced_value(planning.space.sites[link.tail], link.result)
