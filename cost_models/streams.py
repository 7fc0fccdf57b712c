"""Simulate one rank's step on several streams: one for computation, and one for each class of links.

A step is a sequence of segments (blocks of the model, forward and then backward). A segment is a list of operations in
program order. Computation runs on one stream, one operation after the other. A communication runs on the stream of its
links:

* It starts when its operands are computed and its stream is free. Each stream runs its operations in order of issue.
* Only the operations that read its result wait for it, and barrier segments and the end of the step.
* Communication that needs no result of the step is issued early, `prefetch` segments ahead, as in FSDP (Zhao et al.
  2023).
* While any communication runs, computation takes (1 + slowdown) times as long, because both use the same processors and
  memory.
* The host issues operations in program order, `dispatch_s` apart, ahead of the device.

Without overlap, each communication runs at its place in the program, and everything waits for it.

Repeated segments are compressed once: neighbouring computations between which no communication is awaited or started
become one operation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from cost_models import constants
from cost_models.errors import CostArgumentError
from cost_models.hardware import Cluster
from cost_models.timeline import COMPUTE, Span, Timeline


class Op(NamedTuple):
    """One operation of a segment.

    Args:
        name: name in the trace.
        label: the key in the dicts of `StreamTimes` at which its time is counted: "forward" or "backward" for a
            computation, a mesh axis for a communication.
        seconds: its time while nothing else runs.
        stream: COMPUTE, or the class of links of a communication.
        needs: indices of earlier operations of the segment. A communication lists the makers of its operands; a
            computation lists the communications that it waits for. (Computations are ordered anyway.)
        early: whether the operation is a communication that needs no result of the step, e.g. a gather of parameters.
        launches: number of kernels that the host launches; 0 for views.
    """

    name: str
    label: str
    seconds: float
    stream: str = COMPUTE
    needs: tuple[int, ...] = ()
    early: bool = False
    launches: int = 1


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the step, such as a block's forward.

    If `is_barrier`, the segment waits for all earlier communication, as the update does.
    """

    name: str
    ops: tuple[Op, ...]
    is_barrier: bool = False


@dataclass(frozen=True, slots=True)
class Overlap:
    """How a runtime overlaps communication with computation.

    Computation beside communication takes 1 + `slowdown` times as long. Parameters are gathered `prefetch` segments
    before their use.
    """

    prefetch: int = 1
    slowdown: float = field(default_factory=lambda: measured_slowdown())


def overlap_of(cluster: Cluster) -> Overlap | None:
    """Return how a program's communication overlaps with computation on a cluster; None if overlap does not help.

    On a GPU, collectives take some of its processors (`measured_slowdown`). CPUs of one machine are as busy in
    communication as in computation. Work of 62 ms in sequence took 64 ms overlapped (Gloo on loopback, two cores,
    2026-11-23). CPUs behind a network mostly wait for it, so overlap hides more time than it costs.
    """
    if cluster.device.dispatch_s:
        return Overlap()
    return Overlap(slowdown=_number("network_slowdown")) if cluster.nodes > 1 else None


def concurrent_time(computation_s: float, communication_s: float) -> float:
    """Seconds until computation and communication that start together are both done.

    This is max(communication, computation + slowdown * min(computation, communication)).
    """
    return max(communication_s, computation_s + slowed(computation_s, communication_s))


def slowed(computation_s: float, communication_s: float) -> float:
    """Seconds by which communication prolongs the computation beside it."""
    return measured_slowdown() * min(computation_s, communication_s)


@lru_cache(maxsize=1)
def measured_slowdown() -> float:
    """Return the slowdown of a GPU's computation beside communication, a mean in `data/runtime/overlap.toml`."""
    return _number("compute_slowdown")


def _number(key: str) -> float:
    return constants.load("runtime", "overlap").number(key, "1")


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """The times of a simulated step, in seconds.

    Args:
        total_s: time of the step, the sum of `compute_s`, `slowdown_s`, `exposed_s` and `host_s`.
        compute_s: label of computation to its time without communication beside it.
        slowdown_s: time by which communication prolongs the computation beside it.
        exposed_s: label of communication to the time in which computation waits for it.
        host_s: time in which the device waits for the host to issue an operation.
        communication_s: label of communication to its time. All but the exposed time is overlapped.
        timeline: spans of the step, if recorded.
    """

    total_s: float
    compute_s: Mapping[str, float]
    slowdown_s: float
    exposed_s: Mapping[str, float]
    host_s: float
    communication_s: Mapping[str, float]
    timeline: Timeline | None = None

    @property
    def overlapped_s(self) -> dict[str, float]:
        """Label of communication to the seconds in which computation does not wait for it."""
        return {label: max(0.0, busy - self.exposed_s.get(label, 0.0)) for label, busy in self.communication_s.items()}


def simulate_streams(
    segments: Sequence[Segment], overlap: Overlap | None = None, *, dispatch_s: float = 0.0, record: bool = False
) -> StreamTimes:
    """Simulate a step, and return its times.

    Args:
        segments: the segments in order. A segment that repeats should be the same object each time.
        overlap: how communication overlaps with computation; None for no overlap.
        dispatch_s: seconds of host time to issue one operation; 0 if the device is its own host.
        record: whether to return the timeline too; then computations are not merged.

    Raises:
        CostArgumentError: a time is negative, or an operation needs an operation that is not earlier.

    Example:
        >>> gather = Op("gather w", "data", 2.0, "network", early=True)
        >>> block = Segment("block", (gather, Op("x @ w", "forward", 3.0, needs=(0,))))
        >>> simulate_streams([block] * 10).total_s
        50.0
        >>> simulate_streams([block] * 10, Overlap(prefetch=1, slowdown=0.0)).total_s
        32.0
    """
    plain = {id(segment): segment for segment in segments}
    for segment in plain.values():
        _check(segment)
    compiled = {
        key: _compile(segment, overlap is not None, dispatch_s, merge=not record) for key, segment in plain.items()
    }
    run = _StreamState([compiled[id(segment)] for segment in segments], overlap, dispatch_s, record)
    run.all_segments()
    return run.times()


class _Chain(NamedTuple):
    """Operations of one stream that run back to back.

    Let the chain take d `seconds`. If the stream is free at time c and the host at time h, the chain ends at
    max(c + d, h + lag). The lag is the maximum over i of (i * dispatch + the seconds from operation i on).
    """

    op: Op
    launches: int
    seconds: float
    lag_s: float

    @classmethod
    def of(cls, op: Op, dispatch_s: float) -> _Chain:
        return cls(op, op.launches, op.seconds, op.launches * dispatch_s + op.seconds)

    def then(self, other: _Chain, dispatch_s: float) -> _Chain:
        lag = max(self.lag_s + other.seconds, self.launches * dispatch_s + other.lag_s)
        return _Chain(self.op, self.launches + other.launches, self.seconds + other.seconds, lag)


class _Compiled(NamedTuple):
    """A segment prepared for the simulation.

    Args:
        early: communications that are issued segments ahead (`Op.early`), with their indices in the segment. Without
            overlap, there are none.
        ops: all other operations with their indices, in order of issue. With overlap, a communication comes right after
            the last computation that it needs. Neighbouring computations may be merged into one chain.
        compute_s: label of computation to its seconds in the segment.
    """

    is_barrier: bool
    early: tuple[tuple[int, Op], ...]
    ops: tuple[tuple[int, _Chain], ...]
    compute_s: Mapping[str, float]


def _compile(segment: Segment, overlaps: bool, dispatch_s: float, merge: bool) -> _Compiled:
    """Prepare `segment` for the simulation.

    Operations keep their indices in the segment. If `merge`, neighbouring computations become one chain, which has the
    index of its last operation.
    """
    early = tuple((index, op) for index, op in enumerate(segment.ops) if op.early and overlaps)
    ops = [(index, op) for index, op in enumerate(segment.ops) if not (op.early and overlaps)]
    if overlaps:
        places = {index: index if op.stream == COMPUTE else _place(op, segment.ops) for index, op in ops}
        ops.sort(key=lambda item: (places[item[0]], item[1].stream != COMPUTE, item[0]))
    compute: dict[str, float] = defaultdict(float)
    for op in segment.ops:
        if op.stream == COMPUTE:
            compute[op.label] += op.seconds
    chains = [(index, _Chain.of(op, dispatch_s)) for index, op in ops]
    chains = _merge(chains, segment.ops, dispatch_s) if merge else chains
    return _Compiled(segment.is_barrier, early, tuple(chains), dict(compute))


def _place(op: Op, ops: Sequence[Op]) -> int:
    """Return the index of the last computation that a communication needs, directly or through others; -1 for none."""
    return max((need if ops[need].stream == COMPUTE else _place(ops[need], ops) for need in op.needs), default=-1)


def _merge(ordered: Sequence[tuple[int, _Chain]], ops: Sequence[Op], dispatch_s: float) -> list[tuple[int, _Chain]]:
    """Merge neighbouring computations, as far as no communication starts or is awaited between them."""
    merged: list[tuple[int, _Chain]] = []
    for index, chain in ordered:
        waits = any(ops[need].stream != COMPUTE for need in chain.op.needs)
        if chain.op.stream == COMPUTE and merged and merged[-1][1].op.stream == COMPUTE and not waits:
            merged[-1] = (index, merged[-1][1].then(chain, dispatch_s))
        else:
            merged.append((index, chain))
    return merged


@dataclass(slots=True)
class _Stream:
    """A stream's issued communications (start, end, label). All communications before index `first` have ended."""

    ran: list[tuple[float, float, str]] = field(default_factory=list)
    first: int = 0

    @property
    def free(self) -> float:
        return self.ran[-1][1] if self.ran else 0.0


@dataclass(slots=True)
class _StreamState:
    """The state of a simulation. The compute stream is free from `clock` on, and the host from `host` on.

    `early` maps the number of a segment to its early communications: index to (start, end, stream).
    """

    segments: Sequence[_Compiled]
    overlap: Overlap | None
    dispatch_s: float
    record: bool
    clock: float = 0.0
    host: float = 0.0
    slowdown_s: float = 0.0
    host_s: float = 0.0
    streams: dict[str, _Stream] = field(default_factory=lambda: defaultdict(_Stream))
    early: dict[int, dict[int, tuple[float, float, str]]] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)

    def all_segments(self) -> None:
        """Run all segments, then wait for all communication."""
        ahead = 0
        for number, segment in enumerate(self.segments):
            if segment.is_barrier:
                self._wait_for_all()
            if self.overlap is not None:
                while ahead < len(self.segments) and ahead <= number + self.overlap.prefetch:
                    self._issue_early(ahead)
                    ahead += 1
            self._run_segment(number, segment)
        self._wait_for_all()

    def times(self) -> StreamTimes:
        compute: dict[str, float] = defaultdict(float)
        busy: dict[str, float] = defaultdict(float)
        for segment in self.segments:
            for label, seconds in segment.compute_s.items():
                compute[label] += seconds
        for stream in self.streams.values():
            for start, end, label in stream.ran:
                busy[label] += end - start
        spans = tuple(sorted(self.spans, key=lambda span: span.start_s))
        return StreamTimes(
            total_s=self.clock,
            compute_s=dict(compute),
            slowdown_s=self.slowdown_s,
            exposed_s=dict(self.exposed),
            host_s=self.host_s,
            communication_s=dict(busy),
            timeline=Timeline(spans, ("each rank",)) if self.record else None,
        )

    def _issue_early(self, number: int) -> None:
        """Issue the communication of segment `number` that needs no result of the step."""
        done = self.early[number] = {}
        for index, op in self.segments[number].early:
            ready = max((done[need][1] for need in op.needs), default=self.clock)
            done[index] = (*self._communicate(op, ready), op.stream)

    def _run_segment(self, number: int, segment: _Compiled) -> None:
        ends = self.early.pop(number, {})
        for index, chain in segment.ops:
            op = chain.op
            if op.stream != COMPUTE:
                ends[index] = self._issue(op, ends)
                continue
            for need in op.needs:
                if need in ends:
                    self._wait(*ends[need][1:])
            ends[index] = (self.clock, self._compute(chain), COMPUTE)

    def _issue(self, op: Op, ends: Mapping[int, tuple[float, float, str]]) -> tuple[float, float, str]:
        """Issue a communication of the current segment; return (start, end, stream).

        With overlap, the communication starts once its operands are done. Without overlap, computation waits for it.
        `ends` has (start, end, stream) of the segment's operations so far, by their index in the segment.
        """
        if self.overlap is None:
            start, end = self._communicate(op, self.clock)
            self._wait(end, op.stream)
            return start, end, op.stream
        ready = max((ends[need][1] for need in op.needs if need in ends), default=self.clock)
        start, end = self._communicate(op, ready)
        return start, end, op.stream

    def _communicate(self, op: Op, ready: float) -> tuple[float, float]:
        stream = self.streams[op.stream]
        self.host += op.launches * self.dispatch_s
        start = max(stream.free, ready, self.host)
        end = start + op.seconds
        stream.ran.append((start, end, op.label))
        if self.record:
            self.spans.append(Span(op.name, op.stream, start, end))
        return start, end

    def _wait(self, until: float, name: str) -> None:
        """Let the compute stream wait for the stream `name` until the time `until`, and count the wait.

        Meanwhile, communication on that stream is exposed. While that stream is idle too, communication on other
        streams is exposed. The remaining time is waiting for the host.
        """
        if until <= self.clock or name == COMPUTE:
            return
        idle = [(self.clock, until)]
        for stream in (self.streams[name], *(other for key, other in self.streams.items() if key != name)):
            if idle:
                idle = self._expose(stream, idle)
        if self.dispatch_s > 0:
            self.host_s += sum(end - start for start, end in idle)
        self.clock = until

    def _expose(self, stream: _Stream, idle: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Count communication within idle intervals as exposed; return the rest of the intervals."""
        left = []
        for first, last in idle:
            for start, end, label in reversed(stream.ran):
                if end <= first or last <= first:
                    break
                if start < last:
                    self.exposed[label] += min(end, last) - max(start, first)
                    if end < last:
                        left.append((end, last))
                    last = max(start, first)
            if first < last:
                left.append((first, last))
        return sorted(left)

    def _wait_for_all(self) -> None:
        for name, stream in sorted(self.streams.items(), key=lambda item: item[1].free):
            self._wait(stream.free, name)

    def _compute(self, chain: _Chain) -> float:
        """Run operations back to back on the compute stream, and return the time at which the last ends, in seconds.

        Communication slows the operations. None of them starts before the host has issued it.
        """
        start, issued = self.clock, self.host
        if self._is_alone():
            self.clock = start + chain.seconds
        else:
            self.clock = self._slowed_end(chain.seconds)
            self.slowdown_s += max(0.0, self.clock - start - chain.seconds)
        self.host += chain.launches * self.dispatch_s
        late = issued + chain.lag_s - self.clock
        if self.dispatch_s > 0 and late > 0:
            self.host_s += late
            self.clock += late
            start += late
        if self.record:
            self.spans.append(Span(chain.op.name, COMPUTE, start, self.clock))
        return self.clock

    def _is_alone(self) -> bool:
        return self.overlap is None or self.overlap.slowdown == 0 or not self.streams

    def _slowed_end(self, seconds: float) -> float:
        """Return the time at which `seconds` of computation end, if they start now and communication slows them."""
        assert self.overlap is not None
        now, left, rate = self.clock, seconds, 1 / (1 + self.overlap.slowdown)
        while True:
            change, busy = self._next_change(now)
            speed = rate if busy else 1.0
            if now + left / speed <= change:
                return now + left / speed
            left -= (change - now) * speed
            now = change

    def _next_change(self, now: float) -> tuple[float, bool]:
        """Return the next time at which a communication starts or ends, and whether a communication runs at `now`."""
        change, busy = float("inf"), False
        for stream in self.streams.values():
            while stream.first < len(stream.ran) and stream.ran[stream.first][1] <= now:
                stream.first += 1
            if stream.first < len(stream.ran):
                start, end, _ = stream.ran[stream.first]
                busy |= start <= now
                change = min(change, end if start <= now else start)
        return change, busy


def _check(segment: Segment) -> None:
    for index, op in enumerate(segment.ops):
        where = f"Operation {index} {op.name!r} of segment {segment.name!r}"
        if not op.seconds >= 0:
            raise CostArgumentError(f"{where} takes seconds={op.seconds!r}; at least 0.")
        for need in op.needs:
            if not 0 <= need < index:
                raise CostArgumentError(f"{where} needs operation {need}, which is not before it.")
            if op.early and not segment.ops[need].early:
                raise CostArgumentError(f"{where} is early, but needs operation {need}, which is not.")
        if op.early and op.stream == COMPUTE:
            raise CostArgumentError(f"{where} is early; only communication can be.")
