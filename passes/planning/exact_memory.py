"""What is in memory when under one choice, to the byte: what a plan is said to take.

A search bounds memory by tables over pairs of variables (`liveness`). Here everything is decided. At the same points:

1. Inputs, reshards and calls make storages, or give views of those that they read (`_Walk`).
2. A storage is there from its making to its last use, views of it included; what is handed out stays to the end.
3. What a reshard or a call needs for a moment is found by emitting it (`transients`), less what goes meanwhile.
4. What elided units hold is there when `elided_lifetimes` says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from autoshard.ir.program import InputKind, OutputKind
from autoshard.ir.spec import PartitionSpec
from autoshard.kernels.optimizers import IN_PLACE
from autoshard.rules.hub import hub
from passes.memory.elided_lifetimes import Key, elided_intervals
from passes.memory.liveness import GRADIENT, UPDATE, Interval
from passes.memory.memory_tables import differs, is_on_host, traced_value
from passes.memory.transients import LocalForm, Moved, Transients
from passes.planning.build_assignment import PlanningProblem
from passes.preparation.insert_hubs import is_gradient_hub
from passes.solver.assignment import Floats
from passes.strategies.enumerate_strategies import Site, leaves_program
from passes.strategies.price import local_bytes

PARTS = ("parameters", "optimizer state", "gradients", "inputs", "activations")

_PART_OF = {InputKind.PARAMETER: "parameters", InputKind.STATE: "optimizer state"}
_WHOLE = PartitionSpec()


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes in memory over an interval, by what they are; negative where something that is counted goes early."""

    part: str
    interval: Interval
    size: float
    number: int = 1


@dataclass(frozen=True, slots=True)
class ExactMemory:
    """All that is in memory at some of `points` points."""

    points: int
    stored: tuple[Stored, ...]

    def used(self) -> Floats:
        """Bytes in use on each rank at every point, [points]."""
        change = np.zeros(self.points + 1)
        for item in self.stored:
            change[item.interval.birth] += item.size * item.number
            change[item.interval.death + 1] -= item.size * item.number
        return np.asarray(np.cumsum(change)[:-1], dtype=np.float64)

    def at(self, point: int) -> dict[str, float]:
        """Bytes in use at a point, by what they are."""
        parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for item in self.stored:
            if point in item.interval:
                parts[item.part] += item.size * item.number
        return parts


def exact_memory(planning: PlanningProblem, choice: Sequence[int]) -> ExactMemory:
    """What is in memory under a choice of one option per variable."""
    walk = _Walk(planning, choice, Transients(planning.space.mesh))
    walk.run()
    return ExactMemory(planning.liveness.points, tuple(_stored(planning, walk)))


def exact_peak(planning: PlanningProblem, choice: Sequence[int]) -> float:
    """The most bytes in use on each rank at any point."""
    return float(exact_memory(planning, choice).used().max())


@dataclass(slots=True, eq=False)
class _Storage:
    """Memory that values lie in, and its last use so far."""

    part: str
    size: int
    birth: int
    death: int

    def use(self, point: int) -> None:
        self.death = max(self.death, point)


@dataclass(frozen=True, slots=True)
class _Local:
    """Where a value lies on each rank; `is_strided`: its dims lie in memory in another order than they come."""

    storage: _Storage
    is_strided: bool = False


@dataclass(frozen=True, slots=True)
class _Reshard:
    """A reshard of what lies in `storage`."""

    point: int
    storage: _Storage
    moved: Moved


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """A call that runs another local form, and the storages of its operands."""

    form: LocalForm
    point: int
    operands: tuple[_Storage, ...]


@dataclass(slots=True)
class _Walk:
    """Follows the program, and notes what makes a storage and what uses it."""

    planning: PlanningProblem
    choice: Sequence[int]
    handing: Transients
    storages: dict[Key, _Storage] = field(default_factory=dict)
    reshards: list[_Reshard] = field(default_factory=list)
    handings: list[_Reshard] = field(default_factory=list)
    rewritten: list[_Rewritten] = field(default_factory=list)
    values: dict[tuple[str, int], _Local] = field(default_factory=dict)
    into: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    out_of: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
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
        for name, site in space.sites.items():
            if site.is_input:
                self._enter(site)
            elif site.node is not None:
                self._call(site)
            for index in self.out_of[name]:
                self._leave(index)
        if self.planning.liveness.micro_batches > 1:
            self._add_sums()

    def _add_sums(self) -> None:
        """Sums of gradients over micro-batches: that so far, and beside both addends the new one."""
        for name, point in self.planning.liveness.adding.items():
            size = self._local_bytes(self.planning.space.sites[name], 0)
            self._new((name, "sum so far"), "gradients", size, 0, point)
            self._new((name, "new sum"), "gradients", size, point, point)

    def _enter(self, site: Site) -> None:
        """An input is there throughout."""
        part = _PART_OF.get(self.kinds[site.name], "inputs")
        size, end = self._local_bytes(site, 0), self.planning.liveness.points - 1
        self.values[site.name, 0] = _Local(self._new((site.name, 0), part, size, 0, end))

    def _call(self, site: Site) -> None:
        """Operands are resharded; then the call makes storages for its results, or views what it is given."""
        point = self.planning.liveness.calls[site.name]
        operands = [self._arriving(index) for index in self.into[site.name]]
        for operand in operands:
            operand.storage.use(point)
        given = tuple(operand.storage for operand in operands)
        strategy = self.planning.strategy(site.name, self.choice)
        form = self.planning.memory.transients.local_form(site, strategy)
        if form is not None:
            self.rewritten.append(_Rewritten(form, point, given))
            made = {number: self._made(site, number, size) for number, size in form.made.items()}
            found = [given[number] if number < len(given) else made[number] for number in form.results]
        elif site.is_alias:
            found = [given[number] for number in _viewed(site)]
        else:
            found = [self._made(site, number, self._local_bytes(site, number)) for number in range(len(site.results))]
        for result, storage in enumerate(found):
            self.values[site.name, result] = _Local(storage, self._is_strided(site, result, operands))
        if is_gradient_hub(site.node):
            _mark_gradient(found[0])

    def _is_strided(self, site: Site, result: int, operands: Sequence[_Local]) -> bool:
        """Whether a result lies strided: a view does as in the trace; others where an operand does that did there."""
        if traced_value(site, result).is_contiguous():
            return False
        traced = [_traced_of(self.planning, index).is_contiguous() for index in self.into[site.name]]
        is_view = site.is_alias and site.node is not None and site.node.target is not hub
        return is_view or all(traced) or any(operand.is_strided for operand in operands)

    def _arriving(self, index: int) -> _Local:
        """Where a link's value is when it arrives: where it was, or in a copy."""
        reshard = self._reshard(index)
        if reshard is not None:
            return _Local(self._copy(index, reshard))
        link = self.planning.space.links[index]
        return self.values[link.tail, link.result]

    def _reshard(self, index: int) -> _Reshard | None:
        """The reshard on a link, if there is one; a use of what is resharded."""
        link = self.planning.space.links[index]
        source = self.planning.strategy(link.tail, self.choice).outputs[link.result]
        head = self.planning.strategy(link.head, self.choice)
        target = head.outputs[0] if link.operand < 0 else head.inputs[link.operand]
        if not self._differs(source, target):
            return None
        value = self.values[link.tail, link.result]
        moved = Moved(_traced_of(self.planning, index), source, target, value.is_strided, value.storage.size)
        reshard = _Reshard(self.planning.liveness.reshards[index], value.storage, moved)
        value.storage.use(reshard.point)
        self.reshards.append(reshard)
        return reshard

    def _differs(self, source: PartitionSpec, target: PartitionSpec) -> bool:
        if (source, target) not in self.differing:
            self.differing[source, target] = bool(differs((source,), (target,), self.planning.space.mesh)[0, 0])
        return self.differing[source, target]

    def _copy(self, index: int, reshard: _Reshard) -> _Storage:
        size, point = self.planning.memory.transients.bytes_of_copy(reshard.moved), reshard.point + 1
        return self._new((index, "copy"), "activations", size, point, point)

    def _made(self, site: Site, number: int, size: int) -> _Storage:
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
            self._hand_out(index, value)
        elif self.kinds[link.head] is InputKind.BUFFER:
            value.storage.use(self.planning.liveness.forward_end)
        else:
            value.storage.use(self.planning.liveness.points - 1)
            _mark_gradient(value.storage)

    def _hand_out(self, index: int, value: _Local) -> None:
        """An output stays as it lies to the end of the forward; and behind that, whole, where a call hands it out."""
        liveness, link = self.planning.liveness, self.planning.space.links[index]
        spec = self.planning.strategy(link.head, self.choice).inputs[0]
        value.storage.use(liveness.forward_end)
        if self.is_step:
            return
        if link.head in liveness.sharded_outputs or not self._differs(spec, _WHOLE):
            value.storage.use(liveness.points - 1)
            return
        traced, point = _traced_of(self.planning, index), liveness.handing[index]
        moved = Moved(traced, spec, _WHOLE, value.is_strided, value.storage.size)
        self.handings.append(_Reshard(point, value.storage, moved))
        size = self.handing.bytes_of_copy(moved)
        self._new((index, "whole"), "activations", size, point + 1, liveness.points - 1)

    def _local_bytes(self, site: Site, result: int) -> int:
        if is_on_host(site):
            return 0
        spec = self.planning.strategy(site.name, self.choice).outputs[result]
        return local_bytes(site.results[result], spec, self.planning.space.mesh)

    def _new(self, key: Key, part: str, size: int, birth: int, death: int) -> _Storage:
        self.storages[key] = _Storage(part, size, birth, death)
        return self.storages[key]


def _viewed(site: Site) -> list[int]:
    """The operand that each result of a view, or of an update in place, shares its memory with."""
    assert site.node is not None, "results of the program are no calls"
    if site.node.target in IN_PLACE:
        return [number for number in range(len(site.results) + 1) if number != GRADIENT]
    return [0] * len(site.results)


def _mark_gradient(storage: _Storage) -> None:
    if storage.part == "activations":
        storage.part = "gradients"


def _traced_of(planning: PlanningProblem, index: int) -> torch.Tensor:
    """The value that a link carries, as the trace has it."""
    link = planning.space.links[index]
    return traced_value(planning.space.sites[link.tail], link.result)


def _stored(planning: PlanningProblem, walk: _Walk) -> Iterator[Stored]:
    """All storages, those of elided units too, and what is there for a moment."""
    own = {key: Interval(storage.birth, storage.death) for key, storage in walk.storages.items()}
    elided = elided_intervals(planning.liveness, planning.elided, planning.space, own)
    found = [*((key, interval, 1) for key, interval in own.items()), *((key, *there) for key, there in elided.items())]
    ratio = planning.liveness.state_bytes_per_parameter_byte
    for key, interval, number in found:
        storage = walk.storages[key]
        yield Stored(storage.part, interval, storage.size, number)
        if storage.part == "parameters" and ratio:
            yield Stored("optimizer state", interval, storage.size * ratio, number)
    for point, size in _moments(planning, walk):
        yield Stored("activations", Interval(point, point), size)


def _moments(planning: PlanningProblem, walk: _Walk) -> Iterator[tuple[int, int]]:
    """Point and bytes of what reshards and rewritten calls need beside what is stored."""
    transients = planning.memory.transients
    for reshard in walk.reshards:
        freed = reshard.storage.death == reshard.point
        yield reshard.point, transients.of_reshard(reshard.moved, freed=freed)
    for reshard in walk.handings:
        yield reshard.point, walk.handing.of_reshard(reshard.moved, freed=False)
    for call in walk.rewritten:
        distinct = list(dict.fromkeys(call.operands))
        sizes = tuple(storage.size for storage in distinct)
        gone = tuple(storage.death == call.point for storage in distinct)
        yield call.point, transients.beside(call.form, tuple(map(distinct.index, call.operands)), sizes, gone)
