"""Ranges are recorded only while they are on, and on GPUs also as NVTX ranges."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from autoshard.runtime.profiling.ranges import PREFIX, Ranges


@pytest.mark.parametrize("are_on", [False, True])
def test_ranges_are_seen_while_they_are_on(are_on: bool) -> None:
    ranges = Ranges()
    ranges.are_on = are_on
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found, ranges.around("forward: mm"):
        torch.ones(2).neg()
    names = [event.name for event in found.events() or ()]
    assert (f"{PREFIX}forward: mm" in names) == are_on


def test_gpu_work_is_marked_for_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `marks_cuda`, each range is pushed to NVTX, which is a fake here, and popped after an error too."""
    log = list[str]()
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", log.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("pop"))
    ranges = Ranges(marks_cuda=True)
    ranges.are_on = True
    with pytest.raises(ValueError, match="inner"), ranges.around("outer"), ranges.around("inner"):
        raise ValueError("inner")
    assert log == [f"{PREFIX}outer", f"{PREFIX}inner", "pop", "pop"]
