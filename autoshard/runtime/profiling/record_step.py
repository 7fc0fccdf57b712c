"""`StepRecording` records one step of this rank with torch's profiler, as named spans.

On an accelerator, spans are those of its kernels. On a CPU, a collective runs beside operators, on threads of its
process group. Its span is that of the group's work, which torch's profiler names "gloo:all_reduce".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, supported_activities

from autoshard.ir.profile import RangeSpan, StepSpans
from autoshard.ir.range_names import is_start, issuing
from autoshard.runtime.profiling.ranges import PREFIX, Ranges

_STEP = "step"
_BACKENDS = ("gloo", "mpi", "ucc", "xccl")


class StepRecording:
    """Records from its creation until `end`. One recording may run at a time, and no other profiler beside it.

    Args:
        ranges: the switch of the ranges, which must be on.
        device: the device of the step's tensors.
    """

    def __init__(self, ranges: Ranges, device: torch.device) -> None:
        self._ranges, self._device = ranges, device
        wanted = {ProfilerActivity.CPU} | ({ProfilerActivity.CUDA} if device.type == "cuda" else set())
        self._profiler = profile(activities=wanted & supported_activities(), acc_events=True)
        self._profiler.start()
        self._step = ranges.begin(_STEP)

    def end(self) -> StepSpans:
        """Wait for the device, end the recording, and return the recorded spans."""
        self.stop()
        return step_spans(self._profiler.events() or ())

    def stop(self) -> None:
        """Wait for the device, and end the recording."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._ranges.end(self._step)
        self._profiler.stop()


def step_spans(events: Iterable[FunctionEvent]) -> StepSpans:
    """Return the spans of the named ranges among the events of a profiler, which recorded one step."""
    events = list(events)
    named = [event for event in events if event.name.startswith(PREFIX)]
    (step,) = (event for event in named if event.name == PREFIX + _STEP and event.device_type == DeviceType.CPU)
    begin_us, end_us = step.time_range.start, step.time_range.end
    on_device = [event for event in named if event.device_type != DeviceType.CPU and event.name != PREFIX + _STEP]
    works = [event for event in events if event.is_async and event.name.partition(":")[0] in _BACKENDS]
    ranges = on_device or _with_works([event for event in named if event is not step], works)
    spans = (
        RangeSpan(name, round((start - begin_us) * 1e3), round((end - begin_us) * 1e3))
        for name, start, end in (_plain(item) for item in ranges)
    )
    return StepSpans(round((end_us - begin_us) * 1e3), tuple(sorted(spans, key=lambda span: span.start_ns)))


_Range = tuple[str, float, float]
"""A range: its name, start and end in microseconds."""


def _plain(item: FunctionEvent | _Range) -> _Range:
    if isinstance(item, tuple):
        return item
    return item.name.removeprefix(PREFIX), item.time_range.start, item.time_range.end


def _with_works(named: Sequence[FunctionEvent], works: Sequence[FunctionEvent]) -> list[_Range]:
    """Return all ranges. A range that starts a collective gets the begin and end of its process group's work.

    The starting call becomes another range (`issuing`). Works are matched with calls in the order in which they begin.
    """
    waiting, found = deque(sorted(map(_plain, works), key=lambda item: item[1])), list[_Range]()
    for name, start, end in sorted(map(_plain, named), key=lambda item: item[1]):
        while waiting and is_start(name) and waiting[0][1] < start:
            waiting.popleft()
        if is_start(name) and waiting:
            _, begun, ended = waiting.popleft()
            found += [(name, begun, ended), (issuing(name), start, end)]
        else:
            found.append((name, start, end))
    return found
