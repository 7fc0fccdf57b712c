"""`step_spans` turns events of torch's profiler into spans of a step; the events are fakes."""

from __future__ import annotations

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from autoshard.ir.profile import RangeSpan
from autoshard.runtime.profiling.ranges import PREFIX
from autoshard.runtime.profiling.record_step import step_spans

REDUCE = "communication over data: all-reduce"
ISSUE, WAIT = "communication over data: issuing the all-reduce", "communication over data: waiting for the all-reduce"


def event(
    name: str, start_us: float, end_us: float, device: DeviceType = DeviceType.CPU, *, is_async: bool = False
) -> FunctionEvent:
    return FunctionEvent(0, name, 1, start_us, end_us, device_type=device, is_async=is_async)


HOST = [
    event(f"{PREFIX}step", 100, 200),
    event(f"{PREFIX}forward: mm", 110, 120),
    event("aten::mm", 111, 119),
    event(f"{PREFIX}{REDUCE}", 120, 122),
    event(f"{PREFIX}{WAIT}", 150, 190),
]


def test_a_collective_is_the_work_of_its_process_group() -> None:
    """A collective's span is the asynchronous work that began after its call; earlier work is left out."""
    works = [event("gloo:all_reduce", 90, 105, is_async=True), event("gloo:all_reduce", 121, 189, is_async=True)]
    step = step_spans([*HOST, *works])
    assert step.duration_ns == 100_000
    assert step.spans == (
        RangeSpan("forward: mm", 10_000, 20_000),
        RangeSpan(ISSUE, 20_000, 22_000),
        RangeSpan(REDUCE, 21_000, 89_000),
        RangeSpan(WAIT, 50_000, 90_000),
    )


def test_a_collective_without_known_work_is_its_call() -> None:
    assert [span.name for span in step_spans(HOST).spans] == ["forward: mm", REDUCE, WAIT]


def test_on_a_gpu_spans_are_those_of_kernels() -> None:
    """If there are GPU events, spans are those of the kernels, and ranges of the host are left out."""
    kernels = [
        event(f"{PREFIX}forward: mm", 130, 170, DeviceType.CUDA),
        event(f"{PREFIX}{REDUCE}", 140, 180, DeviceType.CUDA),
        event("ampere_sgemm", 130, 170, DeviceType.CUDA),
    ]
    assert step_spans([*HOST, *kernels]).spans == (
        RangeSpan("forward: mm", 30_000, 70_000),
        RangeSpan(REDUCE, 40_000, 80_000),
    )
