"""Which pending sums pass through a call, by what is known of the numbers that its other operands hold.

A call that is linear in an operand may take addends of it: f(a + b) = f(a) + f(b) over the real numbers. Beside an
infinity that is not so. (3 - 2) / 0 is infinite on one device, where shards make 3 / 0 - 2 / 0, which is no number; a
clamp behind it, or a choice of elements, makes a finite result of the infinity. So a sum passes

* a product only beside what cannot be infinite;
* a quotient only over what cannot be zero.

Zero times infinity is no number on one device either, so a factor may be zero; an infinite divisor yields zeros. What
a value cannot be follows from how it was made (`autoshard.rules.ranges`), not from the numbers of a call. Where finite
numbers overflow, sums differ by the order of their addends, as by rounding: that is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autoshard.ir.spec import Reduction
from autoshard.rules.notation import Beside, BoundRule


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`, infinities included where a bound is one.

    Example:
        >>> Range(0.5, math.inf).excludes_zero, Range(0.5, math.inf).is_finite
        (True, False)
    """

    low: float
    high: float

    @property
    def is_finite(self) -> bool:
        """Whether no number in it is infinite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def excludes_zero(self) -> bool:
        """Whether zero is not in it."""
        return self.low > 0 or self.high < 0


def with_safe_sums(rule: BoundRule, ranges: Sequence[Range]) -> BoundRule:
    """The rule of a call whose operands have these ranges: with the pending sums that may pass, no others."""
    return replace(
        rule,
        linear=tuple(group for group in rule.linear if _passes(rule, group, ranges)),
        carries=tuple(
            carry
            for carry in rule.carries
            if carry.reduction is not Reduction.SUM or _passes(rule, carry.operands, ranges)
        ),
    )


def _passes(rule: BoundRule, group: Collection[int], ranges: Sequence[Range]) -> bool:
    """Whether no operand beside `group` can make an addend infinite; results of an empty group are zero."""
    return not group or all(
        _is_safe(rule.beside.get(index, Beside.FINITE), found)
        for index, found in enumerate(ranges)
        if index not in group
    )


def _is_safe(needed: Beside, found: Range) -> bool:
    match needed:
        case Beside.FINITE:
            return found.is_finite
        case Beside.NOT_ZERO:
            return found.excludes_zero
        case Beside.ANYTHING:
            return True
        case Beside.NEVER:
            return False
