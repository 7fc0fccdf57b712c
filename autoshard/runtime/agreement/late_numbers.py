"""Read an accelerator's numbers without waiting for it: each call reads the numbers of the previous call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.runtime.agreement.control_group import PieceFact

BEFORE = " of the call before"


@dataclass(frozen=True, slots=True)
class _OnTheirWay:
    """Numbers of one call, which the device is copying to the host.

    Args:
        names: the name of each number.
        values: the copy, int64 in pinned host memory.
        arrived: an event that the device records after the copy.
    """

    names: tuple[PieceFact, ...]
    values: torch.Tensor
    arrived: Any


class LateNumbers:
    """Reads integers at each call. A number on an accelerator is returned one call later."""

    def __init__(self) -> None:
        self._before: _OnTheirWay | None = None

    def read(self, numbers: Mapping[PieceFact, int | torch.Tensor]) -> dict[PieceFact, int]:
        """Return the integers among `numbers`, and the accelerator's numbers of the previous call.

        Names of the previous call's numbers end with `BEFORE`. `numbers` are integers, or 0-dim int64 tensors on an
        accelerator.
        """
        known = {name: number for name, number in numbers.items() if isinstance(number, int)}
        away = {name: number for name, number in numbers.items() if isinstance(number, torch.Tensor)}
        before, self._before = self._before, _start(away) if away else None
        if before is not None:
            before.arrived.synchronize()
            earlier = [PieceFact(f"{name.name}{BEFORE}", name.place) for name in before.names]
            known |= dict(zip(earlier, before.values.tolist(), strict=True))
        return known


def _start(numbers: Mapping[PieceFact, torch.Tensor]) -> _OnTheirWay:
    values = torch.stack(list(numbers.values()))
    arriving = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    arriving.copy_(values, non_blocking=True)
    arrived = torch.Event(values.device)
    arrived.record()
    return _OnTheirWay(tuple(numbers), arriving, arrived)
