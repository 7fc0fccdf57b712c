"""Finds the range of possible numbers of each value in a traced program.

It is interval arithmetic (Moore, 1966) over the graph, in the order of its nodes. A range ignores NaN. Floating-point
parameters, buffers and inputs may be any number, infinities included. Results of operators outside the table below may
also be any number.

A partial sum may pass a product only if the other factor is finite, and a quotient only if the divisor is not zero
(`autoshard.rules.linearity`). The ranges say whether an operand is finite or nonzero.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.kernels.offload import TRANSFERS
from autoshard.rules.fan_out import fan_out
from autoshard.rules.linearity import Range

aten = torch.ops.aten


ANYTHING = Range(-math.inf, math.inf)
_UNIT = Range(0.0, 1.0)
_FROM_ZERO = Range(0.0, math.inf)

_RangeFunction = Callable[[fx.Node, Sequence[Range]], Range]
"""A function from a call and the ranges of its tensor operands to the range of the call's results."""

_functions: dict[Any, _RangeFunction] = {}


Ranges = Mapping[fx.Node, Range]
"""From each node of a program to the range of its value."""


def find_ranges(graph_module: fx.GraphModule) -> Ranges:
    """Return the range of each value of a traced program.

    For a call that returns a tuple, the range covers all floating-point numbers in the tuple.
    """
    found: dict[fx.Node, Range] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            found[node] = _of_constant(getattr(graph_module, str(node.target), None))
        else:
            found[node] = _of_node(node, found)
    return found


def facts_of(node: fx.Node, ranges: Ranges) -> tuple[tuple[bool, bool], ...]:
    """Return two bools for each tensor operand of a call: whether its range is finite, and whether it excludes zero."""
    return tuple((found.is_finite, found.excludes_zero) for found in map(ranges.__getitem__, _operands(node)))


def range_of_type(dtype: torch.dtype) -> Range:
    """Return the range of all numbers of a dtype; integers and booleans are finite."""
    if dtype == torch.bool:
        return _UNIT
    if dtype.is_floating_point or dtype.is_complex:
        return ANYTHING
    limits = torch.iinfo(dtype)
    return Range(float(limits.min), float(limits.max))


def range_of_values(values: torch.Tensor) -> Range:
    """Return the range of a tensor's numbers, or of their absolute values if they are complex. NaN is ignored.

    A tensor without numbers has the range from 0 to 0.
    """
    numbers = values.abs().double() if values.is_complex() else values.double()
    numbers = numbers[~numbers.isnan()]
    if not numbers.numel():
        return Range(0.0, 0.0)
    return Range(numbers.min().item(), numbers.max().item())


def _of_constant(value: Any) -> Range:
    """Return the range of a constant's values, or of its dtype if it is on "meta" and has no values."""
    if not isinstance(value, torch.Tensor) or value.is_complex():
        return ANYTHING
    is_known = not value.is_meta and type(value) in (torch.Tensor, torch.nn.Parameter)
    return range_of_values(value) if is_known else range_of_type(value.dtype)


def _of_node(node: fx.Node, found: dict[fx.Node, Range]) -> Range:
    value = node.meta.get("val")
    dtype = value.dtype if isinstance(value, torch.Tensor) else None
    if dtype is not None and (dtype.is_complex or not (dtype.is_floating_point or node.target in _OF_INTEGERS)):
        return range_of_type(dtype)
    made = range_of_call(node, [found[operand] for operand in _operands(node) if operand in found])
    return made if dtype is None else _rounded(made, dtype)


def range_of_call(node: fx.Node, operands: Sequence[Range]) -> Range:
    """Return the range of a call's results before rounding to their dtype, given the ranges of its tensor operands."""
    function = _functions.get(node.target)
    return ANYTHING if function is None else function(node, operands)


def _operands(node: fx.Node) -> list[fx.Node]:
    operands: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), operands.append)
    return operands


def _rounded(made: Range, dtype: torch.dtype) -> Range:
    """Return the range `made` after rounding to `dtype`. Overflow becomes infinity, and underflow becomes zero."""
    if not dtype.is_floating_point:
        return _both(made, range_of_type(dtype))
    limits = torch.finfo(dtype)

    def round_bound(bound: float) -> float:
        if abs(bound) >= limits.max:
            return math.copysign(math.inf, bound)
        return bound if abs(bound) >= 2 * limits.tiny else 0.0

    return Range(round_bound(made.low), round_bound(made.high))


def _both(one: Range, other: Range) -> Range:
    return Range(max(one.low, other.low), min(one.high, other.high))


def _either(ranges: Iterable[Range]) -> Range:
    known = list(ranges)
    return Range(min(item.low for item in known), max(item.high for item in known)) if known else ANYTHING


# The table.


def _ranges(names: str) -> Callable[[_RangeFunction], _RangeFunction]:
    """Return a decorator that registers a function for the aten operators in `names`.

    "sum" stands for all overloads of an operator, and "max.dim" for one overload.
    """

    def register(function: _RangeFunction) -> _RangeFunction:
        for name in names.split():
            packet_name, _, overload = name.partition(".")
            packet = getattr(aten, packet_name)
            for each in [overload] if overload else packet.overloads():
                _functions[getattr(packet, each)] = function
        return function

    return register


@_ranges(
    "alias amax amin as_strided chunk clone contiguous detach diagonal expand flip gather index.Tensor index_select "
    "max.default max.dim mean median min.default min.dim narrow permute repeat reshape roll select slice sort split "
    "split_with_sizes squeeze t topk transpose unbind _unsafe_view unsqueeze view.default _to_copy"
)
def _of_first(_: fx.Node, ranges: Sequence[Range]) -> Range:
    """Return the range of the first operand. The results are its elements, or lie between its elements."""
    return ranges[0] if ranges else ANYTHING


_functions.update(dict.fromkeys((fan_out, operator.getitem, *TRANSFERS), _of_first))


@_ranges("cat stack maximum minimum")
def _of_any(_: fx.Node, ranges: Sequence[Range]) -> Range:
    return _either(ranges)


@_ranges("where.self")
def _of_choice(_: fx.Node, ranges: Sequence[Range]) -> Range:
    return _either(ranges[1:])


@_ranges("where.ScalarOther where.ScalarSelf")
def _of_choice_with_number(node: fx.Node, ranges: Sequence[Range]) -> Range:
    return _either([*ranges[1:], *(_number(item) for item in node.args[1:] if not isinstance(item, fx.Node))])


@_ranges("masked_fill.Scalar")
def _of_filled(node: fx.Node, ranges: Sequence[Range]) -> Range:
    return _either([ranges[0], _number(node.args[2])])


@_ranges("constant_pad_nd")
def _of_padded(node: fx.Node, ranges: Sequence[Range]) -> Range:
    return _either([ranges[0], _number(node.args[2] if len(node.args) > 2 else 0.0)])


@_ranges("tril triu")
def _or_zero(_: fx.Node, ranges: Sequence[Range]) -> Range:
    return _either([ranges[0], Range(0.0, 0.0)])


@_ranges("sigmoid hardsigmoid _softmax rand rand_like")
def _of_unit(_: fx.Node, __: Sequence[Range]) -> Range:
    return _UNIT


@_ranges("tanh sin cos erf sign sgn")
def _around_zero(_: fx.Node, __: Sequence[Range]) -> Range:
    return Range(-1.0, 1.0)


@_ranges("softplus var var.correction std std.correction linalg_vector_norm norm")
def _from_zero(_: fx.Node, __: Sequence[Range]) -> Range:
    return _FROM_ZERO


@_ranges("relu")
def _relu(_: fx.Node, ranges: Sequence[Range]) -> Range:
    return Range(max(ranges[0].low, 0.0), max(ranges[0].high, 0.0))


@_ranges("full full_like new_full scalar_tensor fill.Scalar")
def _filled(node: fx.Node, _: Sequence[Range]) -> Range:
    return _number(node.args[0] if node.target is aten.scalar_tensor.default else node.args[1])


@_ranges("ones ones_like new_ones")
def _of_ones(_: fx.Node, __: Sequence[Range]) -> Range:
    return Range(1.0, 1.0)


@_ranges("zeros zeros_like new_zeros")
def _of_zeros(_: fx.Node, __: Sequence[Range]) -> Range:
    return Range(0.0, 0.0)


@_ranges("clamp.default clamp_min.default clamp_max.default hardtanh.default")
def _clamped(node: fx.Node, ranges: Sequence[Range]) -> Range:
    names: dict[Any, tuple[str, ...]] = {
        aten.clamp_max.default: ("max",),
        aten.hardtanh.default: ("min_val", "max_val"),
    }
    given = dict(zip(names.get(node.target, ("min", "max")), node.args[1:], strict=False)) | dict(node.kwargs)
    low, high = given.get("min", given.get("min_val")), given.get("max", given.get("max_val"))
    found = ranges[0]
    for bound, pick in ((low, max), (high, min)):
        if isinstance(bound, float | int):
            found = Range(pick(found.low, float(bound)), pick(found.high, float(bound)))
    return found


@_ranges("nan_to_num")
def _finite_instead(node: fx.Node, ranges: Sequence[Range]) -> Range:
    """Return the range of `nan_to_num`, which replaces infinities by the dtype's largest numbers.

    If the call gives other numbers for infinities, the range has all numbers.
    """
    greatest = torch.finfo(node.meta["val"].dtype).max * (1 - 2**-20)
    if len(node.args) > 2 or {"posinf", "neginf"} & set(node.kwargs):
        return ANYTHING
    nan = node.args[1] if len(node.args) > 1 else node.kwargs.get("nan")
    return _either([_both(ranges[0], Range(-greatest, greatest)), _number(nan or 0.0)])


@_ranges("neg")
def _negated(_: fx.Node, ranges: Sequence[Range]) -> Range:
    return Range(-ranges[0].high, -ranges[0].low)


@_ranges("abs")
def _magnitude(_: fx.Node, ranges: Sequence[Range]) -> Range:
    low, high = ranges[0].low, ranges[0].high
    ends = (abs(low), abs(high))
    return Range(min(ends) if ranges[0].excludes_zero else 0.0, max(ends))


@_ranges("add.Tensor add.Scalar sub.Tensor sub.Scalar")
def _added(node: fx.Node, ranges: Sequence[Range]) -> Range:
    """Return the range of a sum or difference. Operands of different signs may cancel and round to zero."""
    if len(node.args) > 2 or "alpha" in node.kwargs:
        return ANYTHING
    one, other = _operand_ranges(node, ranges)
    if node.target in (aten.sub.Tensor, aten.sub.Scalar):
        other = Range(-other.high, -other.low)
    value = node.meta["val"]
    epsilon = torch.finfo(value.dtype).eps if value.dtype.is_floating_point else 0.0
    if math.isnan(one.low + other.low) or math.isnan(one.high + other.high):
        return ANYTHING
    return Range(_sum_bound(one.low, other.low, epsilon), _sum_bound(one.high, other.high, epsilon))


def _sum_bound(one: float, other: float, epsilon: float) -> float:
    total = one + other
    is_cancelled = math.isfinite(total) and one * other < 0 and abs(total) <= 4 * epsilon * max(abs(one), abs(other))
    return 0.0 if is_cancelled else total


@_ranges("mul.Tensor mul.Scalar")
def _multiplied(node: fx.Node, ranges: Sequence[Range]) -> Range:
    return _product(*_operand_ranges(node, ranges))


@_ranges("div.Tensor div.Scalar true_divide.Tensor")
def _divided(node: fx.Node, ranges: Sequence[Range]) -> Range:
    one, other = _operand_ranges(node, ranges)
    return _product(one, _inverse(other))


@_ranges("reciprocal")
def _inverted(_: fx.Node, ranges: Sequence[Range]) -> Range:
    return _inverse(ranges[0])


@_ranges("square")
def _squared(_: fx.Node, ranges: Sequence[Range]) -> Range:
    return _power(ranges[0], 2)


@_ranges("sqrt")
def _root(_: fx.Node, ranges: Sequence[Range]) -> Range:
    return _power(ranges[0], 0.5)


@_ranges("rsqrt")
def _inverse_root(_: fx.Node, ranges: Sequence[Range]) -> Range:
    return _power(ranges[0], -0.5)


@_ranges("pow.Tensor_Scalar")
def _powered(node: fx.Node, ranges: Sequence[Range]) -> Range:
    exponent = node.args[1]
    return _power(ranges[0], exponent) if isinstance(exponent, float | int) else ANYTHING


@_ranges("exp")
def _exponential(_: fx.Node, ranges: Sequence[Range]) -> Range:
    low, high = (math.exp(bound) if bound < 700 else math.inf for bound in (ranges[0].low, ranges[0].high))
    return Range(low, high)


@_ranges("sum cumsum")
def _summed(node: fx.Node, ranges: Sequence[Range]) -> Range:
    """Return the range of a sum of n addends: from n times the least to n times the greatest number of the operand.

    The result includes the operand's own range, because a cumulative sum may have one addend.
    """
    operand = node.args[0]
    if not isinstance(operand, fx.Node):
        return ANYTHING
    size, results = operand.meta["val"].numel(), node.meta["val"].numel()
    count = size if node.target is aten.cumsum.default else size / max(results, 1)
    if not size:
        return Range(0.0, 0.0)
    low, high = (_times(count, bound) for bound in (ranges[0].low, ranges[0].high))
    return Range(min(low, ranges[0].low), max(high, ranges[0].high))


_OF_INTEGERS = frozenset({aten.sum.default, aten.sum.dim_IntList, aten.clamp.default, aten.clamp_min.default})
"""Operators whose integer results have ranges from `_functions`. Other integer results have their dtype's range."""


def _operand_ranges(node: fx.Node, ranges: Sequence[Range]) -> tuple[Range, Range]:
    """Return the ranges of a call's first two arguments, each of which may be a tensor or a number."""
    given = iter(ranges)
    first, second = (next(given) if isinstance(item, fx.Node) else _number(item) for item in node.args[:2])
    return first, second


def _number(value: Any) -> Range:
    if not isinstance(value, float | int) or math.isnan(value):
        return ANYTHING
    return Range(float(value), float(value))


def _times(one: float, other: float) -> float:
    """Return the product, with zero for infinity times zero, because ranges ignore NaN."""
    return 0.0 if one == 0 or other == 0 else one * other


def _product(one: Range, other: Range) -> Range:
    ends = [_times(a, b) for a in (one.low, one.high) for b in (other.low, other.high)]
    return Range(min(ends), max(ends))


def _inverse(divisor: Range) -> Range:
    if not divisor.excludes_zero:
        return ANYTHING
    return Range(1 / divisor.high, 1 / divisor.low)


def _power(base: Range, exponent: float) -> Range:
    """Return the range of `base` to the power 2, 0.5, -0.5, -1 or -2, without NaN.

    Any other exponent gives the range of all numbers.
    """
    if exponent == 2:
        ends = [_times(bound, bound) for bound in (base.low, base.high)]
        return Range(min(ends) if base.excludes_zero else 0.0, max(ends))
    if exponent == 0.5:
        return Range(*(math.sqrt(max(bound, 0.0)) for bound in (base.low, base.high)))
    if exponent in (-0.5, -1, -2):
        return _inverse(_power(base, -exponent)) if exponent != -1 else _inverse(base)
    return ANYTHING
