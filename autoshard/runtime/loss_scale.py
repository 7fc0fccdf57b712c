"""`LossScale`: the present scale of the loss, which follows `torch.amp.GradScaler` step by step.

The scale is a number on the host. The backward begins with the scale in place of 1, and the update multiplies gradients
by the inverse. The host reads the norm of the gradients before it launches the update, and leaves out the update of a
skipped step. A choice between old and new values inside the program would need memory for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from autoshard.errors import NotAvailableError
from autoshard.ir.loss_scaling import SMALLEST_SCALE, LossScaling

_SCALE, _TRACKER = "scale", "_growth_tracker"


class LossScale:
    """The scale of the loss in the next step.

    Args:
        settings: how the scale begins, rises and falls.

    Attributes:
        value: the scale; a float32 value, as in `torch.amp.GradScaler`, and at least 2 ** -126, so that its inverse is
            a float32 value too.
    """

    def __init__(self, settings: LossScaling) -> None:
        self.value = _in_float32(settings.init_scale)
        self._settings = settings
        self._growth_tracker = 0

    @property
    def inverse(self) -> float:
        """The factor that removes the scale from gradients."""
        return 1.0 / self.value

    def update(self, *, was_skipped: bool) -> None:
        """Set the scale of the next step: lower after a skipped step, higher after `growth_interval` finite steps."""
        if was_skipped:
            self.value = max(_in_float32(self.value * self._settings.backoff_factor), SMALLEST_SCALE)
            self._growth_tracker = 0
            return
        self._growth_tracker += 1
        if self._growth_tracker >= self._settings.growth_interval:  # a loaded number may be above it
            grown = _in_float32(self.value * self._settings.growth_factor)
            self.value = grown if math.isfinite(grown) else self.value
            self._growth_tracker = 0

    def state_dict(self) -> dict[str, Any]:
        """Return scale, settings and number of good steps, in the form of `torch.amp.GradScaler.state_dict`."""
        settings = self._settings
        return {
            _SCALE: self.value,
            "growth_factor": settings.growth_factor,
            "backoff_factor": settings.backoff_factor,
            "growth_interval": settings.growth_interval,
            _TRACKER: self._growth_tracker,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the scale and the number of good steps. The settings stay those of this object.

        Raises:
            NotAvailableError: the state is not that of a loss scale.
        """
        if not state.keys() >= {_SCALE, _TRACKER}:
            raise NotAvailableError(
                f"The state of the loss scale has {sorted(state)}, without {_SCALE!r} and {_TRACKER!r}. Load the "
                "result of state_dict of a step in precision='f16', or of an enabled torch.amp.GradScaler."
            )
        self.value, self._growth_tracker = max(float(state[_SCALE]), SMALLEST_SCALE), int(state[_TRACKER])


def _in_float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()
