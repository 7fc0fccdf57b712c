"""Bound the numbers that may be in a region of a padded tensor, and the numbers that operators compute from them.

A region is the clean part of a padded tensor (the elements outside padding), or one part of its padding. The content
of a region is an interval that contains its numbers, and whether all its numbers are finite. Parameters and inputs are
assumed to be finite. Overflow is ignored: results are finite if the operator makes no infinity from finite numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autoshard.graphs.pointwise import is_pointwise
from autoshard.rules.linearity import Range
from autoshard.rules.ranges import range_of_call, range_of_type

aten = torch.ops.aten

_EXACT = 2.0**53
"""Whole numbers below this number are exact in float64."""

_MASKED = -5e3
"""Scores up to this number have no weight in a softmax. Masks add -1e4 or less, and other scores are far above."""


@dataclass(frozen=True, slots=True)
class PaddedContent:
    """The numbers that may be in a region of a padded tensor.

    Args:
        low, high: bounds of all numbers, both included.
        is_finite: whether all numbers are finite; then no number is NaN.
        is_clean: whether each number of the region also occurs in the clean part (the elements outside padding), as if
            padding repeats a row.
        is_like_clean: whether the region contains infinities only if the clean part contains infinities. For example,
            all rows of finite scores, in padding or not, add one row of a mask with -inf.

    Example:
        >>> constant(0.0).is_constant, UNKNOWN.is_constant
        (True, False)
    """

    low: float
    high: float
    is_finite: bool
    is_clean: bool = field(default=False, compare=False)
    is_like_clean: bool = field(default=False, compare=False)

    @property
    def has_no_infinity_of_its_own(self) -> bool:
        """Whether the region contains infinities only if the clean part contains infinities."""
        return self.is_finite or self.is_clean or self.is_like_clean

    @property
    def is_constant(self) -> bool:
        """Whether all elements of the region equal one number, which is known."""
        return self.low == self.high

    @property
    def is_zero(self) -> bool:
        """Whether all elements of the region are zero."""
        return self.low == self.high == 0

    def is_only(self, number: float) -> bool:
        """Whether all elements of the region equal `number`."""
        return self.low == self.high == number

    def lies_in(self, low: float, high: float) -> bool:
        """Whether all elements of the region lie between `low` and `high`, both included."""
        return low <= self.low and self.high <= high


UNKNOWN = PaddedContent(-math.inf, math.inf, is_finite=False)
_FINITE = PaddedContent(-math.inf, math.inf, is_finite=True)


def constant(number: Any) -> PaddedContent:
    """Return the content of a region whose elements all equal `number`; `UNKNOWN` if `number` is NaN or no number."""
    if not isinstance(number, (int, float)) or math.isnan(number):
        return UNKNOWN
    return PaddedContent(float(number), float(number), math.isfinite(number))


def content_of_type(dtype: torch.dtype) -> PaddedContent:
    """Return the content of a region about which only its dtype is known: any finite numbers of the dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        return _FINITE
    return _from_range(range_of_type(dtype), is_finite=True)


def either(contents: Iterable[PaddedContent]) -> PaddedContent:
    """Return the content of a region whose elements come from several regions, given the contents of those regions."""
    known = list(contents)
    return PaddedContent(
        min(item.low for item in known),
        max(item.high for item in known),
        all(item.is_finite for item in known),
        is_clean=len(known) == 1 and known[0].is_clean,
        is_like_clean=all(item.has_no_infinity_of_its_own for item in known),
    )


def is_masked(content: PaddedContent) -> bool:
    """Whether all numbers of a content, such as -inf or -1e9, have no weight in a softmax."""
    return content.high <= _MASKED


def masked_sum(mask: PaddedContent) -> PaddedContent:
    """Return the content of attention scores plus a mask whose content is `mask`; the mask hides these scores."""
    return PaddedContent(-math.inf, 0.9 * mask.high, mask.is_finite)


def content_of_call(node: fx.Node, operands: Sequence[PaddedContent]) -> PaddedContent:
    """Return the content of a region of a call's first result.

    `operands` has the content of each tensor operand in the elements from which the region is computed.
    """
    dtype = _dtype_of(node)
    if dtype is None or dtype.is_complex:
        return (
            UNKNOWN if dtype is None else PaddedContent(-math.inf, math.inf, all(item.is_finite for item in operands))
        )
    made = _compute(node, operands) or _combine(node, operands, dtype) or _bound(node, operands, dtype)
    if operands and is_pointwise(node.target) and all(item.is_clean for item in operands):
        return replace(made, is_clean=True)
    return made


def _dtype_of(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = value[0]
    return value.dtype if isinstance(value, torch.Tensor) else None


def _from_range(found: Range, *, is_finite: bool) -> PaddedContent:
    is_infinity = found.low == found.high and math.isinf(found.low)
    return PaddedContent(found.low, found.high, is_finite and not is_infinity)


# Known numbers are computed.


def _compute(node: fx.Node, operands: Sequence[PaddedContent]) -> PaddedContent | None:
    """Return the content of a pointwise call whose operands are constant in a region, by running its operator.

    Return None if the call is not pointwise, or an operand is not constant.
    """
    if not is_pointwise(node.target) or not operands:
        return None
    if not all(item.is_constant and (abs(item.low) < _EXACT or not item.is_finite) for item in operands):
        return None
    given = iter(operands)

    def scalar(operand: fx.Node) -> torch.Tensor:
        return torch.full((), next(given).low, dtype=operand.meta["val"].dtype)

    args, kwargs = fx.map_arg((node.args, node.kwargs), scalar)
    result = node.target(*args, **kwargs)  # type: ignore[operator]
    return constant(result.item()) if isinstance(result, torch.Tensor) and not result.is_complex() else None


# Operators with functions of their own.

_Function = Callable[[fx.Node, Sequence[PaddedContent]], PaddedContent | None]


def _arguments(node: fx.Node, operands: Sequence[PaddedContent]) -> list[PaddedContent]:
    """Return the contents of all positional arguments; a Python number among them counts as a constant."""
    given = iter(operands)
    return [next(given) if isinstance(item, fx.Node) else replace(constant(item), is_clean=True) for item in node.args]


def _where(node: fx.Node, operands: Sequence[PaddedContent]) -> PaddedContent | None:
    condition, one, other = _arguments(node, operands)
    return _chosen(condition, one, other)


def _masked_fill(node: fx.Node, operands: Sequence[PaddedContent]) -> PaddedContent | None:
    x, mask, value = _arguments(node, operands)
    return _chosen(mask, value, x)


def _chosen(condition: PaddedContent, one: PaddedContent, other: PaddedContent) -> PaddedContent:
    if not condition.is_constant:
        made = either((one, other))
        return replace(made, is_like_clean=made.is_like_clean and condition.is_clean)
    found, left = (one, other) if condition.low else (other, one)
    # If the clean part chooses differently, it is infinite.
    is_like_clean = found.has_no_infinity_of_its_own and (condition.is_clean or _is_infinity(left))
    return replace(found, is_clean=False, is_like_clean=is_like_clean)


def _is_infinity(content: PaddedContent) -> bool:
    return content.is_constant and math.isinf(content.low)


def _mul(node: fx.Node, operands: Sequence[PaddedContent]) -> PaddedContent | None:
    one, other = _arguments(node, operands)
    if (one.is_zero and other.is_finite) or (other.is_zero and one.is_finite):
        return constant(0)
    return None


def _and(node: fx.Node, operands: Sequence[PaddedContent]) -> PaddedContent | None:
    given = _arguments(node, operands)
    return constant(0) if any(item.is_zero for item in given) else _other_than(1, node, given)


def _or(node: fx.Node, operands: Sequence[PaddedContent]) -> PaddedContent | None:
    given = _arguments(node, operands)
    is_true = _are_boolean(node) and any(item.is_only(1) for item in given)
    return constant(1) if is_true else _other_than(0, node, given)


def _other_than(neutral: float, node: fx.Node, given: Sequence[PaddedContent]) -> PaddedContent | None:
    """Return the content of `x` in a call such as `x & True` (`neutral` is 1) or `x | False` (`neutral` is 0).

    Return None for other calls.
    """
    if not _are_boolean(node) or len(given) != 2 or not any(item.is_only(neutral) for item in given):
        return None
    return given[1] if given[0].is_only(neutral) else given[0]


def _are_boolean(node: fx.Node) -> bool:
    return all(operand.meta["val"].dtype == torch.bool for operand in node.all_input_nodes)


def _sum(node: fx.Node, operands: Sequence[PaddedContent]) -> PaddedContent | None:
    """Return the content of scores plus a mask of large negative numbers (`is_masked`), or None for other sums."""
    dtype = _dtype_of(node)
    if len(node.args) > 2 or node.kwargs or dtype is None or not dtype.is_floating_point:
        return None
    one, other = _arguments(node, operands)
    for number, beside in ((one, other), (other, one)):
        if is_masked(number) and beside.is_finite and not is_masked(beside):
            return masked_sum(number)
    return None


def _comparison(holds: Callable[[float, float], bool], *, at_ends: str) -> _Function:
    """Return a function that gives the content of a comparison's result in a region.

    The content is 1 if the comparison holds for all elements, and 0 if it holds for none. Else the function returns
    None.

    Args:
        holds: the comparison of two numbers.
        at_ends: "less" for `<` and `<=`, "more" for `>` and `>=`.
    """

    def function(node: fx.Node, operands: Sequence[PaddedContent]) -> PaddedContent | None:
        one, other = _arguments(node, operands)
        if not (one.is_finite and other.is_finite):
            return None
        first, second = (one.high, other.low), (one.low, other.high)
        always, ever = (first, second) if at_ends == "less" else (second, first)
        if holds(*always):
            return constant(1)
        return None if holds(*ever) else constant(0)

    return function


def _is_equal(node: fx.Node, operands: Sequence[PaddedContent]) -> PaddedContent | None:
    one, other = _arguments(node, operands)
    if one.is_finite and other.is_finite:
        return constant(0) if one.high < other.low or other.high < one.low else None
    is_infinity = [_is_infinity(item) for item in (one, other)]
    are_apart = (is_infinity[0] and other.is_finite) or (is_infinity[1] and one.is_finite)
    return constant(0) if are_apart else None


def _differs(node: fx.Node, operands: Sequence[PaddedContent]) -> PaddedContent | None:
    found = _is_equal(node, operands)
    return None if found is None else constant(1)


def _of_booleans(node: fx.Node, operands: Sequence[PaddedContent]) -> PaddedContent | None:
    return operands[0] if _are_boolean(node) else None


def _convert(node: fx.Node, operands: Sequence[PaddedContent]) -> PaddedContent | None:
    """Return the content of a region after conversion to another dtype; None if the converted numbers are not known."""
    (x,), dtype = operands, _dtype_of(node)
    assert dtype is not None
    if x.is_constant:
        return constant(torch.full((), x.low, dtype=torch.float64).to(dtype).item())
    if dtype == torch.bool:
        return constant(1) if x.is_finite and (x.low > 0 or x.high < 0) else None
    if dtype.is_floating_point:
        return x
    limits = torch.iinfo(dtype)
    return x if x.is_finite and x.lies_in(limits.min, limits.max) else None


def _made_finite(node: fx.Node, operands: Sequence[PaddedContent]) -> PaddedContent | None:
    found = _range_of(node, operands)
    return PaddedContent(found.low, found.high, is_finite=True) if found.is_finite else None


_FUNCTIONS: Mapping[Any, _Function] = {
    aten.where: _where,
    aten.masked_fill: _masked_fill,
    aten.mul: _mul,
    aten.logical_and: _and,
    aten.bitwise_and: _and,
    aten.logical_or: _or,
    aten.bitwise_or: _or,
    aten.add: _sum,
    aten.lt: _comparison(operator.lt, at_ends="less"),
    aten.le: _comparison(operator.le, at_ends="less"),
    aten.gt: _comparison(operator.gt, at_ends="more"),
    aten.ge: _comparison(operator.ge, at_ends="more"),
    aten.eq: _is_equal,
    aten.ne: _differs,
    **dict.fromkeys((aten.all, aten.any), _of_booleans),
    aten._to_copy: _convert,
    aten.nan_to_num: _made_finite,
}
"""Operator → function that bounds the numbers of its result. If the function returns None, `_bound` is used."""


def _combine(node: fx.Node, operands: Sequence[PaddedContent], dtype: torch.dtype) -> PaddedContent | None:
    function = _FUNCTIONS.get(_packet(node))
    return None if function is None else function(node, operands)


# All other operators, by their ranges.


def _bound(node: fx.Node, operands: Sequence[PaddedContent], dtype: torch.dtype) -> PaddedContent:
    if not dtype.is_floating_point:
        return _bound_whole(node, operands, dtype)
    if not all(item.is_finite for item in operands):
        is_like_clean = is_pointwise(node.target) and all(item.has_no_infinity_of_its_own for item in operands)
        return replace(UNKNOWN, is_like_clean=is_like_clean)
    found = _range_of(node, operands)
    return _from_range(found, is_finite=stays_finite(node, operands) or found.is_finite)


def _bound_whole(node: fx.Node, operands: Sequence[PaddedContent], dtype: torch.dtype) -> PaddedContent:
    found, whole = _range_of(node, operands), range_of_type(dtype)
    fits = whole.low <= found.low and found.high <= whole.high and all(item.is_finite for item in operands)
    return PaddedContent(found.low, found.high, is_finite=True) if fits else content_of_type(dtype)


def _range_of(node: fx.Node, operands: Sequence[PaddedContent]) -> Range:
    return range_of_call(node, [Range(item.low, item.high) for item in operands])


def _positive(node: fx.Node, operands: Sequence[PaddedContent]) -> bool:
    return operands[0].low > 0


def _divisor(node: fx.Node, operands: Sequence[PaddedContent]) -> bool:
    divisor = _arguments(node, operands)[1]
    return divisor.low > 0 or divisor.high < 0


def _exponent(node: fx.Node, operands: Sequence[PaddedContent]) -> bool:
    base, exponent = node.args
    if isinstance(base, int | float):
        return base > 0
    is_whole = isinstance(exponent, int | float) and exponent >= 0 and float(exponent).is_integer()
    return is_whole or operands[0].low > 0


def _has_epsilon(node: fx.Node, operands: Sequence[PaddedContent]) -> bool:
    epsilon = node.args[-1]
    return epsilon is None or (isinstance(epsilon, int | float) and epsilon > 0)


def _never(node: fx.Node, operands: Sequence[PaddedContent]) -> bool:
    return False


_RISKS: Mapping[Any, Callable[[fx.Node, Sequence[PaddedContent]], bool]] = {
    **dict.fromkeys((aten.log, aten.log2, aten.log10, aten.sqrt, aten.rsqrt, aten.reciprocal), _positive),
    aten.log1p: lambda node, operands: operands[0].low > -1,
    **dict.fromkeys((aten.div, aten.true_divide, aten.floor_divide, aten.remainder, aten.fmod), _divisor),
    **dict.fromkeys((aten.pow, aten.float_power), _exponent),
    **dict.fromkeys(
        (aten.acos, aten.asin, aten.acosh, aten.atanh, aten.erfinv, aten.logit, aten.lgamma, aten.digamma, aten.xlogy),
        _never,
    ),
    **dict.fromkeys((aten.atan2, aten.angle, aten.hypot, aten.special_entr, aten.special_ndtri), _never),
    **dict.fromkeys((aten.native_layer_norm, aten.native_group_norm, aten._fused_rms_norm), _has_epsilon),
    **dict.fromkeys((aten.polygamma, aten.special_xlog1py, aten.special_zeta), _never),
    **dict.fromkeys((aten.addcdiv, aten.linalg_inv_ex, aten.linalg_solve_triangular, aten.linalg_cholesky_ex), _never),
}
"""Operator → whether a call has finite results and gradients, given the contents of its finite operands.

Operators whose results and gradients are always finite are not listed.
"""

_SOFTMAX = frozenset((aten._softmax, aten._log_softmax, aten.softmax, aten.log_softmax, aten.logsumexp))


def is_softmax(node: fx.Node) -> bool:
    """Whether a node calls a softmax, log-softmax or logsumexp. Gradients are NaN in rows whose scores are all -inf."""
    return _packet(node) in _SOFTMAX


def stays_finite(node: fx.Node, operands: Sequence[PaddedContent]) -> bool:
    """Whether a call makes no infinity or NaN of finite operands, in a region of its results or of their gradients.

    `operands` has the contents of the operands in the region. Operands whose numbers all occur in the clean part too
    are no risk.
    """
    holds = _RISKS.get(_packet(node))
    return holds is None or all(item.is_clean for item in operands) or holds(node, operands)


def may_divide_by_zero(node: fx.Node, operands: Sequence[PaddedContent]) -> bool:
    """Whether a call divides whole numbers, and its divisor may be zero. `operands` is as in `stays_finite`."""
    dtype = _dtype_of(node)
    is_whole = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    return is_whole and _RISKS.get(_packet(node)) is _divisor and not _divisor(node, operands)


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)
