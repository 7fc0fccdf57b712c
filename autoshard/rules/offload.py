"""The rule of copies to host memory and back. Any dim may be split, and each rank copies its own piece or addend."""

from __future__ import annotations

from typing import Any

from autoshard.kernels.offload import TRANSFERS
from autoshard.rules.notation import Rule
from autoshard.rules.registry import sharding_rule


@sharding_rule(*TRANSFERS)
def _transfer(x: Any) -> Rule:
    dims = tuple((f"d{index}",) for index in range(x.ndim))
    return Rule(([dims], [dims]), transparent=True)
