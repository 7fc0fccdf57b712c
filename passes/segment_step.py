"""Write the program that a choice stands for as segments of computation and communication, for `cost_models.streams`.

Operations are those of lowering: each call, and before it the reshards of its operands; what leaves the program is
resharded as soon as it is computed. A segment is a run of nodes of one phase that belong to one block (a module whose
path holds a number, up to that number) or to none; blocks whose segments are alike share one object.

* A reshard's collectives are communication on the stream of their axis's links ("network" where groups span nodes,
  else "node"); its copies are computation behind them, or before them where the result leaves the program.
* What is resharded of a parameter, or of what is computed from parameters alone, or of an input, is early: it needs
  nothing of the step.
* Collectives inside a call's rewrite come behind its computation, and what follows waits for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autoshard.ir.program import InputKind
from autoshard.ir.reshard import plan_reshard
from cost_models.streams import Op, Segment
from passes.build_assignment import PlanningProblem
from passes.enumerate_strategies import Link, Site
from passes.liveness import leaves_program
from passes.price import local_bytes

COPIES = "reshard copies"
NETWORK, NODE = "network", "node"

_LinkKey = tuple[int, int, int, int]


class _Sent(NamedTuple):
    """A collective: its mesh axis, stream and seconds."""

    name: str
    axis: str
    stream: str
    seconds: float


class _Reshard(NamedTuple):
    """A reshard: its collectives in order, seconds of copies, and bytes before and after on each rank."""

    sent: tuple[_Sent, ...]
    copied_s: float
    steps: int
    bytes_before: int
    bytes_after: int


class _Call(NamedTuple):
    """A call: seconds of its computation, and the collectives inside it."""

    seconds: float
    sent: tuple[_Sent, ...]


class _Part(NamedTuple):
    """Sites of one block and phase."""

    name: str
    sites: list[str]


@dataclass(slots=True)
class _Segments:
    planning: PlanningProblem
    choice: Sequence[int]
    shares: bool
    calls: dict[int, _Call] = field(default_factory=dict)
    reshards: dict[_LinkKey, _Reshard] = field(default_factory=dict)
    incoming: dict[str, list[Link]] = field(default_factory=lambda: defaultdict(list))
    leaving: dict[str, list[Link]] = field(default_factory=lambda: defaultdict(list))
    free: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        sites = self.planning.space.sites
        for link in self.planning.space.links:
            if leaves_program(sites[link.head], link):
                self.leaving[link.tail].append(link)
            else:
                self.incoming[link.head].append(link)
        self.free = _free_of_the_step(self.planning, self.incoming)

    def all(self) -> list[Segment]:
        made: dict[tuple[object, ...], Segment] = {}
        segments = []
        for part in _parts(self.planning, self.leaving):
            key = self._signature(part) if self.shares else (part.name, len(segments))
            if key not in made:
                made[key] = _Writing(self, part).segment()
            segments.append(made[key])
        return segments

    def _signature(self, part: _Part) -> tuple[object, ...]:
        """Equal for parts whose segments are equal but for names."""
        classes, place = self.planning.classes, {name: index for index, name in enumerate(part.sites)}
        found: list[object] = [self.planning.space.sites[part.sites[0]].phase]
        for name in part.sites:
            found.append(classes[name])
            for link in self.incoming.get(name, ()):
                found.append((classes[link.tail], link.result, place.get(link.tail, -1), link.tail in self.free))
            for link in self.leaving.get(name, ()):
                found.append((link.result, classes[link.head], link.operand))
        return tuple(found)

    def call(self, name: str) -> _Call:
        number = self.planning.classes[name]
        if number not in self.calls:
            site, strategy = self.planning.space.sites[name], self.planning.strategy(name, self.choice)
            prices = self.planning.prices
            sent = tuple(
                _Sent(f"all_reduce in {name}", axis, self._stream(axis), seconds)
                for axis, seconds in prices.collectives_inside(site, strategy)
            )
            whole = prices.call_time(site, strategy)
            self.calls[number] = _Call(max(0.0, whole - sum(item.seconds for item in sent)), sent)
        return self.calls[number]

    def reshard(self, link: Link) -> _Reshard:
        key = self.planning.link_key(link)
        if key not in self.reshards:
            self.reshards[key] = self._price(link)
        return self.reshards[key]

    def _price(self, link: Link) -> _Reshard:
        space, price = self.planning.space, self.planning.prices.step_price
        value = space.sites[link.tail].results[link.result]
        source = self.planning.strategy(link.tail, self.choice).outputs[link.result]
        head = self.planning.strategy(link.head, self.choice)
        target = head.inputs[link.operand] if link.operand >= 0 else head.outputs[0]
        steps = plan_reshard(source, target, value.shape, space.mesh, itemsize=value.itemsize, cost=price)
        times = [price.parts(step) for step in steps]
        sent = tuple(
            _Sent(f"{step.kind.value} {link.tail} over {step.axis}", step.axis, self._stream(step.axis), seconds)
            for step, (seconds, _) in zip(steps, times, strict=True)
            if seconds > 0
        )
        sizes = (local_bytes(value, spec, space.mesh) for spec in (source, target))
        return _Reshard(sent, sum(copied for _, copied in times), len(steps), *sizes)

    def _stream(self, axis: str) -> str:
        group = self.planning.prices.cluster.group_links(dict(self.planning.space.mesh.axes), (axis,))
        return NETWORK if group.nodes > 1 else NODE


@dataclass(slots=True)
class _Writing:
    """One segment in the making; `made` says behind which operation each site's value is there."""

    whole: _Segments
    part: _Part
    ops: list[Op] = field(default_factory=list)
    made: dict[str, int] = field(default_factory=dict)

    def segment(self) -> Segment:
        for name in self.part.sites:
            self._write_call(self.whole.planning.space.sites[name])
            for link in self.whole.leaving.get(name, ()):
                self._write_leaving(link)
        return Segment(self.part.name, tuple(self.ops))

    def _write_call(self, site: Site) -> None:
        waits = [self._write_reshard(link) for link in self.whole.incoming.get(site.name, ())]
        needs = tuple(index for index in waits if index is not None)
        call = self.whole.call(site.name)
        behind = [self.made[link.tail] for link in self.whole.incoming.get(site.name, ()) if link.tail in self.made]
        if call.seconds > 0 or needs:
            self._add(Op(site.name, site.phase, call.seconds, needs=needs, launches=int(call.seconds > 0)))
            behind.append(len(self.ops) - 1)
        if call.sent:
            last = self._write_chain(call.sent, tuple(behind[-1:]))
            self._add(Op(site.name, site.phase, 0.0, needs=(last,), launches=0))
            behind.append(len(self.ops) - 1)
        if behind:
            self.made[site.name] = max(behind)

    def _write_reshard(self, link: Link) -> int | None:
        """The reshard of an operand; the index of the communication that the reader waits for, if any."""
        reshard = self.whole.reshard(link)
        if not reshard.steps:
            return None
        last = None
        if reshard.sent:
            early = link.tail in self.whole.free
            needs = (self.made[link.tail],) if link.tail in self.made and not early else ()
            last = self._write_chain(reshard.sent, needs, early=early, held=reshard.bytes_after if early else 0)
        if reshard.copied_s == 0:
            return last
        self._write_copy(link, reshard, () if last is None else (last,))
        return None

    def _write_leaving(self, link: Link) -> None:
        """What leaves the program is copied, then sent; nothing waits for it but the end of the step."""
        reshard = self.whole.reshard(link)
        if not reshard.steps:
            return
        if reshard.copied_s > 0:
            self._write_copy(link, reshard, ())
        if reshard.sent:
            behind = len(self.ops) - 1 if reshard.copied_s > 0 else self.made.get(link.tail, -1)
            self._write_chain(reshard.sent, (behind,) if behind >= 0 else (), held=reshard.bytes_before)

    def _write_copy(self, link: Link, reshard: _Reshard, needs: tuple[int, ...]) -> None:
        self._add(Op(f"copy {link.tail}", COPIES, reshard.copied_s, needs=needs, launches=reshard.steps))

    def _write_chain(self, sent: Sequence[_Sent], needs: tuple[int, ...], *, early: bool = False, held: int = 0) -> int:
        """Collectives one after the other; the index of the last."""
        for item in sent:
            size = float(held) if item is sent[-1] else 0.0
            self._add(Op(item.name, item.axis, item.seconds, item.stream, needs, early, size))
            needs = (len(self.ops) - 1,)
        return len(self.ops) - 1

    def _add(self, op: Op) -> None:
        self.ops.append(op)


def segment_step(planning: PlanningProblem, choice: Sequence[int], *, shares: bool = True) -> list[Segment]:
    """The segments of a choice's step, in order.

    Args:
        planning: the problem.
        choice: one option per variable.
        shares: alike blocks share one segment, under the first one's names; else each has its own.
    """
    return _Segments(planning, choice, shares).all()


def _parts(planning: PlanningProblem, leaving: Mapping[str, object]) -> Iterator[_Part]:
    """Runs of sites of one block and phase: calls, and inputs that leave the program as they are.

    Calls without a module go with what is before them.
    """
    part: _Part | None = None
    key: tuple[str, str] | None = None
    for name, site in planning.space.sites.items():
        if site.node is None or (site.node.op != "call_function" and name not in leaving):
            continue
        module = site.node.meta.get("module", "")
        here = (_block(module) if module or key is None else key[0], site.phase)
        if part is None or key != here:
            if part is not None:
                yield part
            key, part = here, _Part(f"{site.phase} of {here[0] or 'the model'}", [])
        part.sites.append(name)
    if part is not None:
        yield part


def _block(module: str) -> str:
    """The path up to the first number: "layers.3.mlp" is in "layers.3"; a path without one is its own first name."""
    parts = module.split(".")
    for end, part in enumerate(parts, 1):
        if part.isdigit():
            return ".".join(parts[:end])
    return parts[0]


def _free_of_the_step(planning: PlanningProblem, incoming: dict[str, list[Link]]) -> set[str]:
    """Sites whose values need no computation that a step has to wait for: inputs, and what parameters alone make."""
    kinds = {slot.node: slot.kind for slot in planning.space.program.inputs}
    inputs = {name for name, site in planning.space.sites.items() if site.node is not None and site.node.op in _GIVEN}
    fixed = {name for name in inputs if kinds.get(name) in (None, InputKind.PARAMETER, InputKind.BUFFER)}
    for name, links in incoming.items():
        if all(link.tail in fixed for link in links):
            fixed.add(name)
    return inputs | fixed


_GIVEN = ("placeholder", "get_attr")
