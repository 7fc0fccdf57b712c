"""Restricts a rule to the partial sums that may pass a call, given the possible values of its other operands.

A call that is linear in an operand may take a partial sum: f(a + b) = f(a) + f(b) over the real numbers. Infinities
break this. (3 - 2) / 0 is infinite on one device, but ranks compute 3 / 0 - 2 / 0, which is NaN. On one device, a later
clamp or selection could turn the infinity into a finite result. So a partial sum passes

* a product only if the other factor cannot be infinite;
* a quotient only if the divisor cannot be zero.

The other factor may be zero, because zero times infinity is NaN on one device too. An infinite divisor yields zeros.
The possible values of an operand follow from the calls that made it (`autoshard.rules.ranges`). Overflow of finite
numbers depends on the order of addends, as rounding does, and is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autoshard.rules.notation import BoundRule, OperandCondition


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`, both included. Bounds may be infinite.

    Example:
        >>> Range(0.5, math.inf).excludes_zero, Range(0.5, math.inf).is_finite
        (True, False)
    """

    low: float
    high: float

    @property
    def is_finite(self) -> bool:
        """Whether all numbers in the range are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def with_safe_sums(rule: BoundRule, ranges: Sequence[Range]) -> BoundRule:
    """Return the rule without the partial sums that could make the result differ from the result on one device.

    For example, the sum of the ranks' results could be NaN. `ranges` has the possible values of each operand of the
    call.
    """
    return replace(rule, linear=tuple(group for group in rule.linear if _passes(rule, group, ranges)))


def _passes(rule: BoundRule, group: Collection[int], ranges: Sequence[Range]) -> bool:
    """Whether the operands `group` may be partial sums: all other operands meet their conditions in `rule.beside`."""
    return not group or all(
        _is_safe(rule.beside.get(index, OperandCondition.FINITE), found)
        for index, found in enumerate(ranges)
        if index not in group
    )


def _is_safe(needed: OperandCondition, found: Range) -> bool:
    match needed:
        case OperandCondition.FINITE:
            return found.is_finite
        case OperandCondition.NOT_ZERO:
            return found.excludes_zero
        case OperandCondition.ANYTHING:
            return True
        case OperandCondition.NEVER:
            return False
