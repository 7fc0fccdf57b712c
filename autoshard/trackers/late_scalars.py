"""`LateScalars` reads numbers that an accelerator computes, without waiting for work that is queued after them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autoshard.runtime.agreement.late_numbers import Arriving


class LateScalars:
    """Numbers by name. The copy to the host begins when this object is made, and ends while the next step runs.

    Numbers on the host are read at once, so that their tensors may change afterwards.

    Args:
        numbers: floats, or tensors with one element.
    """

    def __init__(self, numbers: Mapping[str, float | torch.Tensor]) -> None:
        away = {name: item for name, item in numbers.items() if isinstance(item, torch.Tensor) and not item.is_cpu}
        self._known = {
            name: float(item.detach() if isinstance(item, torch.Tensor) else item)
            for name, item in numbers.items()
            if name not in away
        }
        self._names = tuple(away)
        self._arriving = Arriving([item.detach().reshape(()).float() for item in away.values()]) if away else None

    def read(self) -> dict[str, float]:
        """Return the numbers by name; wait for their copy if it has not ended."""
        arrived = () if self._arriving is None else self._arriving.read()
        return self._known | dict(zip(self._names, arrived, strict=True))
