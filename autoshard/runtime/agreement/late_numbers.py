"""Read an accelerator's numbers without waiting for it: each call reads the numbers of the previous call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard.runtime.agreement.control_group import PieceFact

BEFORE = " of the call before"


class Arriving:
    """Scalars that an accelerator is copying to the host, while the host and the accelerator go on.

    Args:
        scalars: 0-dim tensors on one accelerator, of one dtype.
    """

    def __init__(self, scalars: Sequence[torch.Tensor]) -> None:
        values = torch.stack(list(scalars))
        self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._arrived = torch.Event(values.device)
        self._arrived.record()

    def read(self) -> list[Any]:
        """Wait for the copy, and return the numbers."""
        self._arrived.synchronize()
        return self._values.tolist()


class LateNumbers:
    """Reads integers at each call. A number on an accelerator is returned one call later."""

    def __init__(self) -> None:
        self._before: tuple[tuple[PieceFact, ...], Arriving] | None = None

    def read(self, numbers: Mapping[PieceFact, torch.Tensor]) -> dict[PieceFact, int]:
        """Return the CPU's integers among `numbers`, and the accelerator's numbers of the previous call.

        Names of the previous call's numbers end with `BEFORE`. `numbers` are 0-dim int64 tensors.
        """
        known = {name: int(number) for name, number in numbers.items() if number.is_cpu}
        away = {name: number for name, number in numbers.items() if not number.is_cpu}
        before, self._before = self._before, (tuple(away), Arriving(list(away.values()))) if away else None
        if before is not None:
            earlier = (PieceFact(f"{name.name}{BEFORE}", name.place) for name in before[0])
            known |= dict(zip(earlier, before[1].read(), strict=True))
        return known
