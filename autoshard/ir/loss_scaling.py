"""`LossScaling`: settings of the dynamic loss scale, with which a step trains in float16.

Micikevicius et al. (2018), "Mixed precision training", section 3.2: gradients below 6e-8 are zero in float16. So the
loss is multiplied by a scale, and the gradients are divided by the scale in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from autoshard.errors import NotAvailableError

SMALLEST_SCALE, LARGEST_SCALE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Scales between which both a scale and its inverse are finite float32 values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaling:
    """Settings of the loss scale under `precision="f16"`, with names and defaults of `torch.amp.GradScaler`.

    If a gradient of a step is not finite, the step skips its update, and the loss scale falls. After enough updates in
    a row, the loss scale rises.

    Args:
        init_scale: loss scale of the first step, above 1.2e-38 and below 3.4e38. Default: 65536.
        growth_factor: factor by which the loss scale rises, above 1. Default: 2.
        backoff_factor: factor by which the loss scale falls, above 0 and below 1. Default: 0.5.
        growth_interval: number of updates in a row after which the loss scale rises, at least 1. Default: 2000.

    Raises:
        NotAvailableError: a value is out of its range.

    Example:
        >>> LossScaling(growth_interval=100).init_scale
        65536.0
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        _check("init_scale", self.init_scale, SMALLEST_SCALE, LARGEST_SCALE)
        _check("growth_factor", self.growth_factor, 1.0, math.inf)
        _check("backoff_factor", self.backoff_factor, 0.0, 1.0)
        interval = self.growth_interval
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise NotAvailableError(f"LossScaling(growth_interval={interval!r}): pass a whole number of at least 1.")


def _check(name: str, value: Any, low: float, high: float) -> None:
    """Raise `NotAvailableError` unless a value is a number between `low` and `high`, and neither of the two."""
    if isinstance(value, bool) or not isinstance(value, Real) or not low < float(value) < high:
        limits = f"above {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        raise NotAvailableError(f"LossScaling({name}={value!r}): pass a number {limits}.")


def scales_loss(precision: str | None, optimizer: object | None) -> bool:
    """Whether training steps scale the loss: in float16 with an optimizer.

    `precision` is the precision of the program, a result of `effective_precision`.
    """
    return precision == "f16" and optimizer is not None
