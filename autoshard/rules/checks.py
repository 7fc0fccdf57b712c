"""The rule of `autoshard::checked`: the checked condition must be whole, and the returned value may have any spec."""

from __future__ import annotations

from torch import Tensor

from autoshard.kernels.checks import checked
from autoshard.rules.dims import all_blocked, named
from autoshard.rules.notation import Rule
from autoshard.rules.registry import sharding_rule


@sharding_rule(checked)
def _checked(x: Tensor, status: Tensor, message: str, is_matrix: bool | None = None) -> Rule:
    dims = named(x.dim())
    return Rule(((dims, all_blocked(status.dim())), (dims,)), transparent=True)
