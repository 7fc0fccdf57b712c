"""Simulate one rank's step on several streams: one for computation, and one for each class of links.

A step is a sequence of segments, such as the forward of a micro-batch. A segment is a list of operations in program
order. Computation runs on one stream, one operation after the other. A communication runs on the stream of its links:

* It starts when its operands are computed and its stream is free. Each stream runs its operations in program order.
* Only the operations that read its result, and the end of the step, wait for it.
* While any communication runs, computation takes (1 + slowdown) times as long, because both use the same processors and
  memory.
* The host issues operations in program order, `dispatch_s` apart, ahead of the device.

Without overlap, each communication runs at its place in the program, and everything waits for it.
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
        launches: number of kernels that the host launches; 0 for views.
    """

    name: str
    label: str
    seconds: float
    stream: str = COMPUTE
    needs: tuple[int, ...] = ()
    launches: int = 1


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the step, such as the forward of a micro-batch."""

    name: str
    ops: tuple[Op, ...]


def overlap_of(cluster: Cluster) -> float | None:
    """Return the slowdown of computation beside communication on a cluster, or None if overlap does not help.

    On a GPU, collectives take some of its processors (`measured_slowdown`). CPUs of one machine are as busy in
    communication as in computation. Work of 62 ms in sequence took 64 ms overlapped (Gloo on loopback, two cores,
    2026-11-23). CPUs behind a network mostly wait for it, so overlap hides more time than it costs.
    """
    if cluster.device.dispatch_s:
        return measured_slowdown()
    return _number("network_slowdown") if cluster.nodes > 1 else None


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
        timeline: spans of the step.
    """

    total_s: float
    compute_s: Mapping[str, float]
    slowdown_s: float
    exposed_s: Mapping[str, float]
    host_s: float
    communication_s: Mapping[str, float]
    timeline: Timeline

    @property
    def overlapped_s(self) -> dict[str, float]:
        """Label of communication to the seconds in which computation does not wait for it."""
        return {label: max(0.0, busy - self.exposed_s.get(label, 0.0)) for label, busy in self.communication_s.items()}


def simulate_streams(
    segments: Sequence[Segment], slowdown: float | None = None, *, dispatch_s: float = 0.0
) -> StreamTimes:
    """Simulate a step, and return its times.

    Args:
        segments: the segments in order.
        slowdown: computation beside communication takes 1 + `slowdown` times as long; None for no overlap.
        dispatch_s: seconds of host time to issue one operation; 0 if the device is its own host.

    Raises:
        CostArgumentError: a time is negative, or an operation needs an operation that is not earlier.

    Example:
        >>> reduction = Op("reduce g", "data", 2.0, "network", needs=(0,))
        >>> block = Segment("block", (Op("x @ w", "backward", 3.0), reduction))
        >>> simulate_streams([block] * 10).total_s
        50.0
        >>> simulate_streams([block] * 10, slowdown=0.0).total_s
        32.0
    """
    for segment in {id(each): each for each in segments}.values():
        _check(segment)
    state = _StreamState(slowdown, dispatch_s)
    for segment in segments:
        state.run(segment)
    return state.times()


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
    """The state of a simulation. The compute stream is free from `clock` on, and the host from `host` on."""

    slowdown: float | None
    dispatch_s: float
    clock: float = 0.0
    host: float = 0.0
    slowdown_s: float = 0.0
    host_s: float = 0.0
    streams: dict[str, _Stream] = field(default_factory=lambda: defaultdict(_Stream))
    compute: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)

    def run(self, segment: Segment) -> None:
        ends: list[float] = []
        for op in segment.ops:
            if op.stream == COMPUTE:
                for need in op.needs:
                    self._wait(ends[need], segment.ops[need].stream)
                ends.append(self._compute(op))
            elif self.slowdown is None:
                ends.append(self._communicate(op, self.clock))
                self._wait(ends[-1], op.stream)
            else:
                ends.append(self._communicate(op, max((ends[need] for need in op.needs), default=self.clock)))

    def times(self) -> StreamTimes:
        """Wait for all communication, and return the times of the step."""
        for name, stream in sorted(self.streams.items(), key=lambda item: item[1].free):
            self._wait(stream.free, name)
        busy: dict[str, float] = defaultdict(float)
        for stream in self.streams.values():
            for start, end, label in stream.ran:
                busy[label] += end - start
        spans = tuple(sorted(self.spans, key=lambda span: span.start_s))
        return StreamTimes(
            total_s=self.clock,
            compute_s=dict(self.compute),
            slowdown_s=self.slowdown_s,
            exposed_s=dict(self.exposed),
            host_s=self.host_s,
            communication_s=dict(busy),
            timeline=Timeline(spans, ("each rank",)),
        )

    def _communicate(self, op: Op, ready: float) -> float:
        """Issue a communication whose operands are done at the time `ready`, and return the time at which it ends."""
        stream = self.streams[op.stream]
        self.host += op.launches * self.dispatch_s
        start = max(stream.free, ready, self.host)
        end = start + op.seconds
        stream.ran.append((start, end, op.label))
        self.spans.append(Span(op.name, op.stream, start, end))
        return end

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
        """Count communication of `stream` in the `idle` intervals as exposed. Return the remaining intervals."""
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

    def _compute(self, op: Op) -> float:
        """Run an operation on the compute stream, and return the time at which it ends, in seconds.

        Communication slows the operation. It does not start before the host has issued it.
        """
        start = self.clock
        self.compute[op.label] += op.seconds
        self.host += op.launches * self.dispatch_s
        self.clock = self._slowed_end(op.seconds) if self.slowdown and self.streams else start + op.seconds
        self.slowdown_s += max(0.0, self.clock - start - op.seconds)
        late = self.host + op.seconds - self.clock
        if self.dispatch_s > 0 and late > 0:
            self.host_s += late
            self.clock += late
            start += late
        self.spans.append(Span(op.name, COMPUTE, start, self.clock))
        return self.clock

    def _slowed_end(self, seconds: float) -> float:
        """Return the time at which `seconds` of computation end, if they start now and communication slows them."""
        now, left, rate = self.clock, seconds, 1 / (1 + (self.slowdown or 0.0))
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
