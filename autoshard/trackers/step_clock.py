"""`StepClock` measures the time of a step: on the host, or between two events of an accelerator."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class StepClock:
    """Measures steps on a device. On an accelerator, nothing waits until the time of a step is read.

    Args:
        device: the device of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: Any = None

    def begin(self) -> None:
        """Note the start of a step."""
        self._begun = self._now()

    def end(self) -> Callable[[], float]:
        """Note the end of the step; return a function that returns the step's time in seconds."""
        begun, ended = self._begun, self._now()
        if self._device.type == "cpu":
            return lambda: ended - begun
        return lambda: _elapsed_s(begun, ended)

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def _elapsed_s(begun: Any, ended: Any) -> float:
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3
