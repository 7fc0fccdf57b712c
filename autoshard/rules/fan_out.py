"""The fan-out: an identity that the planner inserts, so that a value is resharded once for several readers."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.rules.notation import Rule
from autoshard.rules.registry import rule_of


def fan_out(x: torch.Tensor) -> torch.Tensor:
    """Return `x` itself, to mark the place of a shared reshard; lowering removes the call."""
    return x


@rule_of(fan_out)
def _fan_out(x: Any) -> Rule:
    dims = tuple((f"d{index}",) for index in range(x.ndim))
    return Rule(([dims], [dims]), linear=[(0,)])
