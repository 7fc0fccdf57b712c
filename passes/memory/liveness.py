"""Find the lifetimes of a program's values in memory, under all plans at once, as a guide for searches.

The lowered program decides whether a plan fits (`passes.memory.lowered_memory`), and a search is repeated within less
memory until its choice fits. So this guide ignores short-lived memory, except the copies that reshards make.

A lifetime is an interval of *program points*, which number the actions of the lowered program in order. For each call,
each operand is resharded in turn, then the call runs, then results that leave the program are resharded. One more point
after the forward returns the outputs. A value with memory of its own takes memory from its call to its last use,
including uses through views. A copy that a reshard makes takes memory from the reshard on.

* If the last use of a value is a reshard, the value is freed after the reshard. Otherwise it lives until the call that
  reads it is over.
* The memory behind a view or a fan-out is either the value itself, or the copy that a reshard made on the way there.
  Both have the same bytes, which the view's spec alone decides (`EITHER`).
* Parameters, buffers, inputs and constants live from the start to the end; parameters also carry optimizer state. An
  update overwrites its operands, so it needs no further memory.
* Results live to the end. A call returns its outputs whole, and a training step returns none.

Every size depends on the options of at most two variables. There is one exception: the copy of an input may be used by
a view of the input, or by a copy of that view. The size would depend on three variables, so both copies are counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autoshard.ir.program import InputKind, InputSlot, OutputKind, Program
from autoshard.ir.staged import crosses_stages
from autoshard.kernels.optimizers import IN_PLACE, is_overwritten
from passes.memory.stage_load import ONE_STAGE, StageLoad
from passes.preparation.insert_fan_outs import is_gradient_fan_out
from passes.strategies.enumerate_strategies import Link, SearchSpace, Site, leaves_program

UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Interval:
    """A lifetime: its first and its last program point, both inclusive."""

    birth: int
    death: int

    def __contains__(self, point: int) -> bool:
        return self.birth <= point <= self.death


class Held(StrEnum):
    """Kind of memory that a link uses for some time. A link is the path of a value from its maker to one reader."""

    COPY = "the copy that a reshard on the link makes"
    VALUE = "the value itself, if there is no reshard on the link"
    EITHER = "the value or its copy"
    PACKED = "the pieces in order that a reshard of inner dims makes beside the copy"


@dataclass(frozen=True, slots=True)
class OnLink:
    """Memory of the kind `held` that the link `SearchSpace.links[link]` uses over an interval of program points."""

    link: int
    held: Held
    interval: Interval


@dataclass(frozen=True, slots=True)
class RepeatedLifetimes:
    """Lifetimes of values in the repeated units that a program leaves out (`passes.strategies.repeated`).

    Args:
        values: (name of a site, index of its result) → the lifetime and the number of the value's copies in all
            left-out units.
        on_links: memory of links, each with the number of its copies in all left-out units.
    """

    values: Mapping[tuple[str, int], tuple[Interval, int]] = field(default_factory=dict)
    on_links: tuple[tuple[OnLink, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Liveness:
    """Lifetimes of a program's values, and of the copies on its links.

    Args:
        points: number of program points.
        values: (name of a site, index of its result) to the lifetime, for values with memory of their own (no views).
        calls: name of a call to the point at which it runs.
        reshards: index of a link to the point of a reshard on the link.
        forward_end: the point after the forward, when outputs are returned in the plan's spec.
        adding: name of a gradient's fan-out to the point at which the gradient is added to its sum over micro-batches.
        state_bytes_per_parameter_byte: bytes of optimizer state for each byte of a parameter.
        parameters: names of the placeholders that are parameters with optimizer state.
        of_micro_batch: name of each placeholder that differs between micro-batches → whether it is an activation from
            another stage, which the backward may read.
        repeated: lifetimes in the units that the program leaves out.
    """

    points: int
    values: Mapping[tuple[str, int], Interval]
    on_links: tuple[OnLink, ...]
    calls: Mapping[str, int]
    reshards: Mapping[int, int]
    forward_end: int
    adding: Mapping[str, int]
    state_bytes_per_parameter_byte: float
    parameters: frozenset[str]
    of_micro_batch: Mapping[str, bool] = field(default_factory=dict)
    repeated: RepeatedLifetimes = RepeatedLifetimes()
    micro_batches: int = 1
    load: StageLoad = ONE_STAGE

    def of(self, space: SearchSpace) -> Liveness:
        """Return the lifetimes of the values in another search space of the same step.

        The number of micro-batches and the load are those of this object.
        """
        return find_lifetimes(space, self.state_bytes_per_parameter_byte, self.micro_batches, self.load)

    def standing(self, interval: Interval, name: str = "") -> int:
        """Return how many more values like a given one are in memory, for other stages and micro-batches of the rank.

        They are counted at all program points. `interval` is the lifetime of the given value. `name` is its site, or ""
        for memory of a link.
        """
        if name in self.of_micro_batch:
            return self.load.in_flight - 1 if self.of_micro_batch[name] else 0
        if interval.birth == 0:
            return self.load.stages - 1
        is_saved = interval.birth <= self.forward_end < interval.death
        return self.load.in_flight - 1 if is_saved else 0

    def held_values(self) -> Iterator[tuple[str, int, Interval, int]]:
        """Yield (name of a site, index of its result, lifetime, number of copies) for each value.

        The values of the program come first, each with number 1. Their copies in left-out units come last.
        """
        for (name, result), interval in self.values.items():
            yield name, result, interval, 1
        for (name, result), (interval, number) in self.repeated.values.items():
            yield name, result, interval, number

    def held_on_links(self) -> Iterator[tuple[OnLink, int]]:
        """Yield the memory of each link with its number of copies. Copies in left-out units come last."""
        yield from ((kept, 1) for kept in self.on_links)
        yield from self.repeated.on_links


def find_lifetimes(
    space: SearchSpace,
    state_bytes_per_parameter_byte: float,
    micro_batches: int = 1,
    load: StageLoad = ONE_STAGE,
) -> Liveness:
    """Find the lifetimes of all values and copies of a search space.

    Args:
        space: the sites and links of a call, or of a training step on one micro-batch.
        state_bytes_per_parameter_byte: bytes of optimizer state for each byte of a parameter.
        micro_batches: number of micro-batches of a step. If there are several, their sums of gradients take memory too.
        load: the stages and micro-batches that the rank has in memory at once.
    """
    times = _Times.of(space)
    lifetimes = _Lifetimes(space, times, micro_batches > 1)
    values, on_links = lifetimes.find()
    parameters = frozenset(slot.node for slot in with_state(space.program))
    micro_batch = (slot for slot in space.program.inputs if slot.kind in (InputKind.INPUT, InputKind.TANGENT))
    calls = {name: times.calls[name] for name, site in space.sites.items() if not site.is_input and name in times.calls}
    return Liveness(
        times.end + 1,
        values,
        on_links,
        calls,
        times.reshards,
        times.forward_end,
        times.adding,
        state_bytes_per_parameter_byte,
        parameters,
        {slot.node: slot.kind is InputKind.INPUT and crosses_stages(slot.name) for slot in micro_batch},
        micro_batches=micro_batches,
        load=load,
    )


def with_state(program: Program) -> tuple[InputSlot, ...]:
    """Return the parameters for which an optimizer keeps state.

    These are the parameters that get a gradient. In a program without gradients, all parameters count.
    """
    trained = {slot.name for slot in program.outputs if slot.kind is OutputKind.GRADIENT}
    parameters = program.inputs_of(InputKind.PARAMETER)
    return tuple(slot for slot in parameters if not trained or slot.name in trained)


@dataclass(frozen=True, slots=True)
class _Times:
    """The program points of all actions. The fields are those of `Liveness`.

    Placeholders count as calls at point 0. `end` is the last point.
    """

    reshards: Mapping[int, int]
    calls: Mapping[str, int]
    forward_end: int
    adding: Mapping[str, int]
    end: int

    @classmethod
    def of(cls, space: SearchSpace) -> _Times:
        into: dict[str, list[int]] = defaultdict(list)
        out_of: dict[str, list[int]] = defaultdict(list)
        for index, link in enumerate(space.links):
            leaving = leaves_program(space.sites[link.head], link)
            (out_of[link.tail] if leaving else into[link.head]).append(index)
        reshards, calls, adding = {}, {}, {}
        point = forward_end = 0
        last = max((n for n, site in enumerate(space.sites.values()) if _runs_in(site, "forward")), default=0)
        for number, (name, site) in enumerate(space.sites.items()):
            if site.node is None:
                continue
            calls[name] = 0
            if not site.is_input:
                for index in into[name]:
                    reshards[index] = point = point + 1
                calls[name] = point = point + 1
            for index in out_of[name]:
                reshards[index] = point = point + 1
            if number == last:
                forward_end = point = point + 1
            if is_gradient_fan_out(site.node):
                adding[name] = point = point + 1
        return cls(reshards, calls, forward_end, adding, point + 1)


def _runs_in(site: Site, phase: str) -> bool:
    return site.node is not None and not site.is_input and site.phase == phase


@dataclass(slots=True)
class _Lifetimes:
    """The search for all lifetimes. Pairs (name of a site, index of its result) are called places here.

    Args:
        readers: place to the indices of the links that read its value.
        viewed: name of a view, fan-out or in-place update to the index of the link whose memory it shares.
        deaths: place to the last point at which its value is used, also through views.
        is_step: whether the program is a training step.
        same: names of sites whose constant is the constant of an earlier site.
    """

    space: SearchSpace
    times: _Times
    sums_gradients: bool
    readers: dict[tuple[str, int], list[int]] = field(init=False)
    viewed: dict[str, int] = field(init=False)
    deaths: dict[tuple[str, int], int] = field(init=False)
    is_step: bool = field(init=False)
    same: set[str] = field(default_factory=set)
    values: dict[tuple[str, int], Interval] = field(default_factory=dict)
    on_links: list[OnLink] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.readers = defaultdict(list)
        self.viewed = {}
        self.is_step = bool(self.space.program.outputs_of(OutputKind.PARAMETER_UPDATE))
        for index, link in enumerate(self.space.links):
            self.readers[link.tail, link.result].append(index)
            if self._is_view(link):
                self.viewed[link.head] = index
        self._find_deaths()
        constants: dict[object, str] = {}
        for name, site in self.space.sites.items():
            if site.is_constant and site.node is not None and constants.setdefault(site.node.target, name) != name:
                self.same.add(name)

    def find(self) -> tuple[dict[tuple[str, int], Interval], tuple[OnLink, ...]]:
        owned: dict[str, int] = {}  # view to the point from which its memory is counted by its own spec
        for name, site in self.space.sites.items():
            for result in range(len(site.results)):
                self._place(name, result, owned)
        for fan_out, point in self.times.adding.items() if self.sums_gradients else ():
            self._keep(self.viewed[fan_out], Held.EITHER, 0, point)  # the sum so far
        return self.values, tuple(self.on_links)

    def _place(self, name: str, result: int, owned: dict[str, int]) -> None:
        """Record the memory of one result of a site, and of the copies that its readers' reshards make.

        Let `sure` be the last point at which the value lives under every plan. The site's own memory is counted up to
        `sure`. After `sure` the value lives only if its last reader does not reshard it, so this memory is counted on
        the link to that reader. If the reader is a view, the view's own spec decides the bytes after `sure`, and
        `owned` receives `sure` + 1.
        """
        site, place = self.space.sites[name], (name, result)
        start = self.times.calls[name] if not site.is_alias else owned.get(name)
        if site.is_alias and len(site.results) > 1:
            start = None
        death = self.deaths[place]
        stays = site.is_input or site.is_constant
        last, sure = (None, death) if start is None or stays else self._last_reader(place)
        if site.is_alias and start is not None:
            self._keep(self.viewed[name], Held.EITHER, start, sure)
        elif not site.is_alias and name not in self.same:
            self.values[place] = Interval(0 if stays else self.times.calls[name], sure)
        for index in self.readers[place]:
            until = sure if index == last and self._is_view(self.space.links[index]) else None
            self._reader(index, death, until)
        if last is None or sure == death:
            return
        link = self.space.links[last]
        if not self._is_view(link):
            self._keep(last, Held.VALUE, sure + 1, death)
            return
        head = self.space.sites[link.head]
        if len(head.results) > 1:
            self._keep(last, Held.EITHER, sure + 1, death)
        else:
            owned[link.head] = sure + 1

    def _last_reader(self, place: tuple[str, int]) -> tuple[int | None, int]:
        """Return the link to a value's last reader, and the last point at which the value lives under every plan.

        The link's index is None if no reshard can end the value's life earlier.
        """
        readers, death = self.readers[place], self.deaths[place]
        if not readers or not self._is_plain(place[0]):
            return None, death
        ends = {index: (self._use(index), self.times.reshards[index]) for index in readers}
        last = max(readers, key=ends.__getitem__)
        others = [ends[index][0] for index in readers if index != last]
        return last, max([self.times.reshards[last], *others])

    def _reader(self, index: int, death: int, until: int | None) -> None:
        """Record the copy that the reshard on link `index` makes for its reader.

        The copy lives up to the point `until`; None: up to the reader's last use. `death` is the last use of the
        resharded value.
        """
        point = self.times.reshards[index]
        link = self.space.links[index]
        self._keep(index, Held.PACKED, point, point)
        if not leaves_program(self.space.sites[link.head], link):
            self._keep(index, Held.COPY, point, self._use(index) if until is None else until)
        elif self.space.sites[link.tail].phase != UPDATE:
            self._result(index, death)
        else:
            self._keep(index, Held.COPY, point, point)

    def _result(self, index: int, death: int) -> None:
        """Record the memory of a result that leaves the program, on the link `index`.

        `death` is the last point of any other use. The result lives to the last point. Outputs of a training step, and
        new values of buffers, live only to the end of the forward.
        """
        head, point = self.space.sites[self.space.links[index].head], self.times.reshards[index]
        goes = self.is_step if head.node is None else head.name in self._buffers()
        until = self.times.forward_end if goes else self.times.end
        self._keep(index, Held.COPY, point, until)
        self._keep(index, Held.VALUE, death + 1, until)

    def _buffers(self) -> Collection[str]:
        return {slot.node for slot in self.space.program.inputs_of(InputKind.BUFFER)}

    def _keep(self, link: int, held: Held, birth: int, death: int) -> None:
        if birth <= death:
            self.on_links.append(OnLink(link, held, Interval(birth, death)))

    def _find_deaths(self) -> None:
        """Fill `deaths`, from the last site to the first, because uses of a view are also uses of the viewed value."""
        self.deaths = {}
        for name, site in reversed(list(self.space.sites.items())):
            for result in range(len(site.results)):
                uses = map(self._use, self.readers[name, result])
                born = self.times.calls[name]
                stays = site.is_input or site.is_constant
                self.deaths[name, result] = self.times.end if stays else max(uses, default=born)

    def _use(self, index: int) -> int:
        """Return the last point at which the reader of link `index` uses the value, directly or through views.

        A reshard on the link would end the use earlier; here the link is taken to have none.
        """
        link = self.space.links[index]
        head = self.space.sites[link.head]
        if leaves_program(head, link):
            return self.times.reshards[index]
        if self._is_view(link) or self._is_written(link):
            return max(self.deaths[head.name, result] for result in range(len(head.results)))
        return self.times.calls[head.name]

    def _is_view(self, link: Link) -> bool:
        return link.operand == 0 and self.space.sites[link.head].is_alias

    def _is_written(self, link: Link) -> bool:
        """Whether the reader of a link is an optimizer's update that overwrites the link's value."""
        node = self.space.sites[link.head].node
        if node is None or node.target not in IN_PLACE or link.operand < 0:
            return False
        return is_overwritten(node.target, link.operand)

    def _is_plain(self, name: str) -> bool:
        """Whether the memory behind a site's results is as large as the results.

        This is not so for a view of a part of a tensor, because the whole tensor stays in memory.
        """
        if name not in self.viewed:
            return True
        link = self.space.links[self.viewed[name]]
        read = self.space.sites[link.tail].results[link.result]
        return all(math.prod(read.shape) == math.prod(value.shape) for value in self.space.sites[name].results)
