"""Write the program that a choice stands for as segments of computation and communication, for `cost_models.streams`.

Operations are those of lowering: each call, and before it the reshards of its operands; what leaves the program is
resharded as soon as it is computed. Segments are the parts of `step_layout`; parts that are equal share one object.

* A reshard's collectives are communication on the stream of their axis's links ("network" where groups span nodes,
  else "node"); its copies are computation behind them, or before them where the result leaves the program.
* Nothing waits for a gradient's reduction but the update, which begins when all of them are done. With buckets it is on
  its way as soon as it is made, wherever between there and the update a choice has it reduced.
* What is resharded of a parameter, or of what is computed from parameters alone, or of an input, is early: it needs
  nothing of the step.
* Copies to and from the host are computation: what follows waits for them, as `compile` runs them.
* What a kernel does in place of calls is one computation, at the place of its last result.
* Collectives inside a call's rewrite come behind its computation, and what follows waits for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autoshard.ir.kernels import NO_KERNELS, Kernels, KernelUse
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.offload import LABEL
from autoshard.ir.reshard import ReshardStep, plan_reshard
from autoshard.kernels.offload import TRANSFERS
from cost_models.streams import Op, Segment
from passes.planning.bucket_prices import BucketPrice, bucketed_links, piece_bytes
from passes.planning.build_assignment import PlanningProblem
from passes.prediction.step_layout import SiteRun, StepLayout, step_layout
from passes.prediction.walk_program import (
    COPIES,
    WalkedStep,
    adding_up,
    computed_by_site,
    seconds_of_adding,
    sent_by_axis,
    stream_of,
)
from passes.preparation.insert_hubs import is_gradient_hub
from passes.strategies.enumerate_strategies import Link, Site, leaves_program
from passes.strategies.price import StepPrice
from passes.strategies.price_nodes import NodePrices

_LinkKey = tuple[int, int, int, int]


class _PricedCollective(NamedTuple):
    """A collective: its mesh axis, stream and seconds, and how often the host issues it; 0 within a bucket."""

    name: str
    axis: str
    stream: str
    seconds: float
    launches: int = 1


class _PricedReshard(NamedTuple):
    """A reshard: its collectives in order, seconds and number of copies."""

    sent: tuple[_PricedCollective, ...]
    copied_s: float
    copies: int


_NOTHING = _PricedReshard((), 0.0, 0)


class _PricedCall(NamedTuple):
    """A call: seconds of its computation (what kernels leave of it), and the collectives inside it."""

    seconds: float
    sent: tuple[_PricedCollective, ...]


@dataclass(slots=True)
class _Costs:
    """What the calls and reshards of a choice cost; alike ones are priced once."""

    planning: PlanningProblem
    choice: Sequence[int]
    layout: StepLayout
    kernels: Kernels = NO_KERNELS
    largest_bytes: Callable[[int], int] | None = None
    computed: Mapping[str, float] | None = None
    adds_up: bool = False
    reshards: dict[tuple[_LinkKey, bool], _PricedReshard] = field(default_factory=dict)
    bucketed: Mapping[Link, int] = field(init=False)
    in_bucket: BucketPrice = field(init=False)
    updating: Mapping[str, Sequence[Link]] = field(init=False)
    kernels_at: Mapping[str, Sequence[KernelUse]] = field(init=False)
    gone: Mapping[str, float] = field(init=False)
    gone_copies: Mapping[tuple[str, str], float] = field(init=False)

    def __post_init__(self) -> None:
        self.bucketed, bucket_bytes = {}, 0
        if self.largest_bytes is not None:
            self.bucketed = {self.planning.space.links[index]: index for index in bucketed_links(self.planning)}
            total = self._bucketed_bytes()
            bucket_bytes = min(total, self.largest_bytes(total))
        self.in_bucket = BucketPrice(self.planning.prices.step_price, bucket_bytes)
        self.updating = {} if self.largest_bytes is None or self.adds_up else self._updating()
        kernels_at, gone = defaultdict[str, list[KernelUse]](list), defaultdict[str, float](float)
        gone_copies = defaultdict[tuple[str, str], float](float)
        for use in self.kernels.uses:
            kernels_at[use.node].append(use)
            for name, share in use.stands_for.items():
                gone[name] += share
            for name, reader, share in use.copies:
                gone_copies[name, reader] += share
        self.kernels_at, self.gone, self.gone_copies = dict(kernels_at), dict(gone), dict(gone_copies)

    def call(self, name: str) -> _PricedCall:
        """The cost of a call."""
        call, gone = self._whole_call(name), self.gone.get(name, 0.0)
        if self.computed is not None:
            call = call._replace(seconds=self.computed.get(name, 0.0))
        return call if gone == 0 else call._replace(seconds=call.seconds * max(0.0, 1.0 - gone))

    def _whole_call(self, name: str) -> _PricedCall:
        """The cost of a call without kernels, found once for each option of its variable and kept with the problem."""
        number = self.planning.classes[name]
        known: dict[tuple[int, int, int], _PricedCall] = self.planning.derived.setdefault("calls", {})
        key = (self.planning.space.sites[name].call, number, self.choice[number])
        if key not in known:
            known[key] = self._price_call(name)
        return known[key]

    def _price_call(self, name: str) -> _PricedCall:
        site, strategy = self.planning.space.sites[name], self.planning.strategy(name, self.choice)
        prices = self.planning.prices
        sent = tuple(
            _PricedCollective(f"all_reduce in {name}", axis, self._stream(axis), seconds)
            for axis, seconds in prices.collectives_inside(site, strategy)
        )
        whole = prices.call_time(site, strategy)
        return _PricedCall(max(0.0, whole - sum(item.seconds for item in sent)), sent)

    def reshard(self, link: Link) -> _PricedReshard:
        """The cost of a link's reshard."""
        reader = link.tail if leaves_program(self.planning.space.sites[link.head], link) else link.head
        reshard, gone = self._whole_reshard(link), self.gone_copies.get((link.tail, reader), 0.0)
        if gone == 0:
            return reshard
        left = max(0.0, 1.0 - gone)
        return reshard._replace(copied_s=left * reshard.copied_s, copies=round(left * reshard.copies))

    def _whole_reshard(self, link: Link) -> _PricedReshard:
        """The same without kernels, found once for each option."""
        key = (self.planning.link_key(link), link in self.bucketed)
        if key not in self.reshards:
            self.reshards[key] = self._price(link)
        return self.reshards[key]

    def _price(self, link: Link) -> _PricedReshard:
        price = self.in_bucket if link in self.bucketed else self.planning.prices.step_price
        steps = self._steps(link, price)
        if not steps:
            return _NOTHING
        times = [price.parts(step) for step in steps]
        issued = int(link not in self.bucketed)
        sent = tuple(
            _PricedCollective(
                f"{step.kind.value} {link.tail} over {step.axis}", step.axis, self._stream(step.axis), seconds, issued
            )
            for step, (seconds, _) in zip(steps, times, strict=True)
            if seconds > 0
        )
        return _PricedReshard(sent, sum(copied for _, copied in times), len(steps))

    def _steps(self, link: Link, price: StepPrice | BucketPrice) -> Sequence[ReshardStep]:
        space = self.planning.space
        value = space.sites[link.tail].results[link.result]
        source = self.planning.strategy(link.tail, self.choice).outputs[link.result]
        head = self.planning.strategy(link.head, self.choice)
        target = head.inputs[link.operand] if link.operand >= 0 else head.outputs[0]
        if source == target:
            return ()
        return plan_reshard(source, target, value.shape, space.mesh, itemsize=value.itemsize, cost=price)

    def is_of_gradient(self, link: Link) -> bool:
        """Whether a link of the backward brings a gradient on its way to the update, which alone waits for it."""
        is_parameter = link.tail in self.layout.free
        return link in self.bucketed and not is_parameter and self.planning.space.sites[link.head].phase != "update"

    def _updating(self) -> dict[str, list[Link]]:
        """Hub of a gradient to the links by which its update reads it: what is sent there begins in the backward."""
        found = defaultdict[str, list[Link]](list)
        for links in self.layout.incoming.values():
            for link in links:
                if is_gradient_hub(self.planning.space.sites[link.tail].node):
                    found[link.tail].append(link)
        return dict(found)

    def _bucketed_bytes(self) -> int:
        """Bytes of one rank's pieces of all that travels in buckets, of the kind of collective that has most."""
        found, runs = defaultdict[tuple[str, str], int](int), self.planning.link_runs()
        for link, index in self.bucketed.items():
            for step in self._steps(link, self.planning.prices.step_price):
                found[step.kind, step.axis] += runs[index] * piece_bytes(step)
        return max(found.values(), default=0)

    def _stream(self, axis: str) -> str:
        return stream_of((axis,), self.planning.prices.cluster, dict(self.planning.space.mesh.axes))


@dataclass(slots=True)
class _SegmentWriter:
    """One segment in the making; `made` says behind which operation each site's value is there."""

    costs: _Costs
    part: SiteRun
    ops: list[Op] = field(default_factory=list)
    made: dict[str, int] = field(default_factory=dict)

    def segment(self) -> Segment:
        for name in self.part.sites:
            self._write_call(self.costs.planning.space.sites[name])
            for link in self.costs.layout.leaving.get(name, ()):
                self._write_leaving(link)
        return Segment(self.part.name, tuple(self.ops), is_barrier=is_of_update(self.part.name))

    def _write_call(self, site: Site) -> None:
        links = self.costs.layout.incoming.get(site.name, ())
        if is_gradient_hub(site.node):
            for link in links:
                self._write_leaving(link)
            made = [self.made[link.tail] for link in links if link.tail in self.made]
            if made:
                self.made[site.name] = max(made)
            for link in self.costs.updating.get(site.name, ()):
                self._write_leaving(link)
            return
        for link in links:
            if link.tail in self.costs.updating:
                continue
            if self.costs.is_of_gradient(link):
                self._write_leaving(link)
            else:
                self._write_reshard(link)
        behind = [self.made[link.tail] for link in links if link.tail in self.made]
        call = self.costs.call(site.name)
        if call.seconds > 0:
            self._add(Op(site.name, _label(site), call.seconds))
            behind.append(len(self.ops) - 1)
        for use in self.costs.kernels_at.get(site.name, ()):
            self._add(Op(use.name, site.phase, use.time_s, launches=use.launches))
            behind.append(len(self.ops) - 1)
        if call.sent:
            last = self._write_chain(call.sent, tuple(behind[-1:]))
            self._add(Op(site.name, site.phase, 0.0, needs=(last,), launches=0))
            behind.append(len(self.ops) - 1)
        if behind:
            self.made[site.name] = max(behind)

    def _write_reshard(self, link: Link) -> None:
        """The reshard of an operand: its collectives, then its copies, which wait for them."""
        reshard = self.costs.reshard(link)
        if not reshard.copies and not reshard.sent:
            return
        needs: tuple[int, ...] = ()
        if reshard.sent:
            early = link.tail in self.costs.layout.free
            behind = (self.made[link.tail],) if link.tail in self.made and not early else ()
            needs = (self._write_chain(reshard.sent, behind, early=early),)
        self._write_copy(link, reshard, needs)

    def _write_leaving(self, link: Link) -> None:
        """What leaves the program, or the backward, is copied, then sent; nothing there waits for it."""
        reshard = self.costs.reshard(link)
        if reshard.copied_s > 0:
            self._write_copy(link, reshard, ())
        if reshard.sent:
            behind = len(self.ops) - 1 if reshard.copied_s > 0 else self.made.get(link.tail, -1)
            self._write_chain(reshard.sent, (behind,) if behind >= 0 else ())

    def _write_copy(self, link: Link, reshard: _PricedReshard, needs: tuple[int, ...]) -> None:
        self._add(Op(f"copy {link.tail}", COPIES, reshard.copied_s, needs=needs, launches=reshard.copies))

    def _write_chain(self, sent: Sequence[_PricedCollective], needs: tuple[int, ...], *, early: bool = False) -> int:
        """Collectives one after the other; the index of the last."""
        for item in sent:
            self._add(Op(item.name, item.axis, item.seconds, item.stream, needs, early, item.launches))
            needs = (len(self.ops) - 1,)
        return len(self.ops) - 1

    def _add(self, op: Op) -> None:
        self.ops.append(op)


def _label(site: Site) -> str:
    """What the time of a call counts as."""
    return LABEL if site.node is not None and site.node.target in TRANSFERS else site.phase


def is_of_update(name: str) -> bool:
    """Whether a segment of this name is a part of the update."""
    return name.startswith("update of ")


def segment_step(
    planning: PlanningProblem, choice: Sequence[int], kernels: Kernels = NO_KERNELS, *, shares: bool = True
) -> list[Segment]:
    """The segments of a choice's step, in order; blocks that the program leaves out run as the one behind them does.

    Args:
        planning: the problem.
        choice: one option per variable.
        kernels: what runs in place of calls.
        shares: equal parts share one segment, under the first one's names; else, and with kernels, each has its own.
    """
    return _segments(_Costs(planning, choice, step_layout(planning), kernels), shares=shares and not kernels.uses)


def _segments(costs: _Costs, *, shares: bool) -> list[Segment]:
    options = np.asarray(costs.choice, dtype=np.int64)
    made: dict[tuple[int, bytes], Segment] = {}
    segments = []
    for part in costs.layout.parts:
        key = (part.structure, options[part.slots].tobytes()) if shares else (id(part), b"")
        if key not in made:
            made[key] = _SegmentWriter(costs, part).segment()
        segments.append(made[key])
    return segments


def repeated_step(
    planning: PlanningProblem,
    choice: Sequence[int],
    micro_batches: int,
    kernels: Kernels = NO_KERNELS,
    largest_bytes: Callable[[int], int] | None = None,
    computed: Mapping[str, float] | None = None,
) -> tuple[Segment, ...]:
    """The segments of a whole step: forward and backward for each micro-batch, adding gradients up, and the update.

    Args:
        planning, choice, kernels: as of `segment_step`.
        micro_batches: how many the step has.
        largest_bytes: size of the largest bucket in which parameters and gradients travel, of the bytes of all of
            them (one rank's pieces); None: each travels alone.
        computed: seconds of each call as it was lowered; None: as the strategies are priced.
    """
    layout, adds_up = step_layout(planning), micro_batches > 1
    costs = _Costs(planning, choice, layout, kernels, largest_bytes, computed, adds_up)
    segments = _segments(costs, shares=False)
    once = [item for item in segments if is_of_update(item.name)]
    each = [item for item in segments if not is_of_update(item.name)]
    return (*each * micro_batches, *adding_up(planning.adding_s(choice), micro_batches), *once)


def folded_step(
    planning: PlanningProblem,
    choice: Sequence[int],
    phased: PhasedProgram,
    prices: NodePrices,
    micro_batches: int,
    largest_bytes: Callable[[int], int] | None = None,
) -> WalkedStep:
    """The step of a program that leaves out blocks: calls take what they take as lowered, and run as often as they do.

    Args:
        planning, choice, micro_batches, largest_bytes: as of `repeated_step`.
        phased: the choice's lowered program, without overlap.
        prices: of its nodes.
    """
    counts, computed = planning.elided.site_counts(), computed_by_site(phased, prices)
    return WalkedStep(
        repeated_step(planning, choice, micro_batches, largest_bytes=largest_bytes, computed=computed),
        sent_by_axis(phased, prices.mesh, micro_batches, counts),
        adding_s=seconds_of_adding(phased, prices.cluster.device, counts),
    )
