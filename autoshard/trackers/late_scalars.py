"""`LateScalars` reads numbers that an accelerator computes, without waiting for work that is queued after them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class LateScalars:
    """Numbers by name. The copy to the host begins when this object is made, and ends while the next step runs.

    Numbers on the host are read at once, so that their tensors may change afterwards.

    Args:
        numbers: floats, or tensors with one element.
    """

    def __init__(self, numbers: Mapping[str, float | torch.Tensor]) -> None:
        away = {
            name: item.detach() for name, item in numbers.items() if isinstance(item, torch.Tensor) and not item.is_cpu
        }
        here = {name: item for name, item in numbers.items() if name not in away}
        self._known = {
            name: float(item.item() if isinstance(item, torch.Tensor) else item) for name, item in here.items()
        }
        self._names = tuple(away)
        self._arriving: torch.Tensor | None = None
        self._arrived: Any = None
        if away:
            values = torch.stack([item.reshape(()).float() for item in away.values()])
            self._arriving = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._arriving.copy_(values, non_blocking=True)
            self._arrived = torch.Event(values.device)
            self._arrived.record()

    def read(self) -> dict[str, float]:
        """Return the numbers by name; wait for their copy if it has not ended."""
        if self._arriving is None:
            return dict(self._known)
        self._arrived.synchronize()
        return self._known | dict(zip(self._names, self._arriving.tolist(), strict=True))
