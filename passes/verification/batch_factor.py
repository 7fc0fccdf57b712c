"""Find the factor of a call's sharding rule along which the samples of a batch lie.

A dim may hold several factors, such as the dim of `x.transpose(0, 1).flatten(0, 1)`: times, then samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.rules.notation import BoundRule
from passes.verification.batch_states import SlicedDim, State


@dataclass(frozen=True, slots=True)
class BatchFactor:
    """The factor with the samples of a batch.

    Args:
        name: the factor in the rule.
        before: the number of blocks within the factor, each of which has all samples.
    """

    name: str
    before: int = 1

    def blocks_in(self, factors: Sequence[str], sizes: Mapping[str, int]) -> int:
        """Return the number of blocks with all samples in a dim that has these factors, with these sizes."""
        return self.before * math.prod(sizes[name] for name in factors[: factors.index(self.name)])


def batch_factor(rule: BoundRule, given: Sequence[State]) -> BatchFactor | None:
    """Return the factor along which all operands of state `SlicedDim`, and no other operands, are split.

    `given` has the states of the operands. None is returned if these operands have no factor in common.
    """
    pairs = list(zip(given, rule.inputs, strict=True))
    found = {
        _factor_at(dims[state.dim], rule.sizes, state.before) for state, dims in pairs if isinstance(state, SlicedDim)
    }
    factor = found.pop() if len(found) == 1 else None
    if factor is None:
        return None
    others = (dim for state, dims in pairs if not isinstance(state, SlicedDim) for dim in dims)
    return None if any(factor.name in dim for dim in others) else factor


def _factor_at(factors: Sequence[str], sizes: Mapping[str, int], before: int) -> BatchFactor | None:
    """Return the factor of a dim that begins with, or contains, the samples behind the first `before` blocks.

    The result is None if there is no such factor.
    """
    for name in factors:
        size = sizes[name]
        if before % size or before == 1:
            return BatchFactor(name, before) if size % before == 0 else None
        before //= size
    return None
