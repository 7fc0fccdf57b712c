"""Rules of operators that act on each element independently, after broadcasting.

Any dim may be split. Rules differ in the partial operands that give partial results. A partial sum passes through
linear operands, a partial maximum through monotone operands, and a partial product through products and powers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autoshard.ir.spec import Reduction
from autoshard.rules.carries import (
    decreasing,
    increasing,
    increasing_addend,
    keeps_sums,
    maxima,
    meaningful,
    minima,
    moving,
    products,
    scaled,
    through_conversion,
)
from autoshard.rules.dims import are_finite, elementwise, is_additive, tensors
from autoshard.rules.notation import Carry, OperandCondition, Rule
from autoshard.rules.registry import sharding_rule, tensor_operands

aten = torch.ops.aten

Linear = Sequence[Sequence[int]]

# Operators of aten that no partial value passes. "eq" stands for all functional overloads of the operator.
_NONLINEAR = """
    __lshift__ __rshift__ __xor__ __and__ __or__ acos asin atan2 atanh bitwise_and.Scalar
    bitwise_and.Scalar_Tensor bitwise_or.Scalar bitwise_or.Scalar_Tensor
    bitwise_left_shift bitwise_right_shift.Scalar_Tensor bitwise_xor copysign.Scalar cos cosh
    digamma eq erfinv float_power floor_divide fmax fmin fmod frac gcd gelu hardswish hypot i0 igamma igammac isfinite
    isinf isnan isneginf isposinf lcm lgamma mvlgamma logical_xor logit mish nan_to_num ne polygamma
    pow.Tensor_Tensor remainder silu sin sinc special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr special_hermite_polynomial_h
    special_hermite_polynomial_he special_i0e special_i1 special_i1e special_laguerre_polynomial_l
    special_legendre_polynomial_p _standard_gamma_grad _dirichlet_grad
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
    special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0
    special_zeta tan _prelu_kernel div.Tensor_mode xlogy.Scalar_Self special_xlog1py.self_scalar
"""

# Operators that are linear in the first operand: scalings, and backwards, which are linear in the gradient.
_LINEAR_IN_FIRST = "real imag _neg_view sigmoid_backward tanh_backward rrelu_with_noise_backward"

# Linear in the first operand, with a factor that is infinite for some finite second operand.
_LINEAR_BETWEEN_POLES = "ldexp.Tensor xlogy.Tensor special_xlog1py.default logit_backward"

# Linear in the first operand, with a factor that is bounded for any second operand.
_LINEAR_AND_BOUNDED = """
    polar gelu_backward silu_backward hardswish_backward mish_backward softplus_backward hardsigmoid_backward
"""

# Never decreasing, or never increasing, in the first operand on the whole real line.
_INCREASING = """
    asinh atan ceil erf exp exp2 expm1 floor hardshrink hardsigmoid hardtanh relu relu6 round sigmoid sinh
    softshrink special_log_ndtr tanh trunc
    clamp.default clip.default clamp_min.default clamp_max.default celu selu
"""
_DECREASING = "angle erfc signbit special_erfcx bitwise_not"

# The result is the gradient where the operand is in some range, and zero elsewhere.
_MASKING_BACKWARDS = "threshold_backward hardtanh_backward softshrink_backward hardshrink_backward"

# Never decreasing, but only defined above some number. If the minimum is above it, all addends are, so minima pass.
_INCREASING_ABOVE = "acosh log log10 log1p log2 sqrt"

_COPIES = "clone contiguous alias alias_copy detach detach_copy positive lift_fresh_copy lift_fresh"


def _overloads(names: str) -> Iterator[Any]:
    """Yield the aten operators in `names`. "pow" stands for all functional overloads, "max.other" for one overload."""
    for name in names.split():
        packet_name, _, overload = name.partition(".")
        packet = getattr(aten, packet_name)
        for candidate in [overload] if overload else packet.overloads():
            operator = getattr(packet, candidate)
            if overload or _is_functional(operator):
                yield operator


def _is_functional(operator: Any) -> bool:
    schema = operator._schema
    takes_tensor = any(isinstance(argument.type, torch.TensorType) for argument in schema.arguments)
    return takes_tensor and not schema.is_mutable and not any(argument.is_out for argument in schema.arguments)


def _pointwise(
    names: str,
    linear: Callable[[Sequence[torch.Tensor]], Linear],
    carries: Sequence[Carry] = (),
    second: OperandCondition = OperandCondition.FINITE,
) -> None:
    """Register the rule of the pointwise operators in `names` (`_overloads`).

    `linear` maps the tensor operands to `Rule.linear`. `second` is the condition on the second operand under which a
    partial sum passes through the first.
    """

    @sharding_rule(*_overloads(names))
    def rule(*args: Any, **kwargs: Any) -> Rule | None:
        operands = tensor_operands(args, kwargs)
        return _rule(operands, linear(operands), carries, {1: second}) if operands else None


def _rule(
    operands: Sequence[torch.Tensor],
    linear: Linear = (),
    carries: Sequence[Carry] = (),
    beside: Mapping[int, OperandCondition] | None = None,
) -> Rule:
    sides = elementwise([operand.shape for operand in operands])
    return Rule(sides, linear=linear, carries=meaningful(operands, carries), beside=beside)


def _never(operands: Sequence[torch.Tensor]) -> Linear:
    return ()


def _in_first(operands: Sequence[torch.Tensor]) -> Linear:
    return [(0,)] if is_additive(operands[0]) else ()


def _in_either(operands: Sequence[torch.Tensor]) -> Linear:
    return [(index,) for index, operand in enumerate(operands) if is_additive(operand)]


def _in_both(operands: Sequence[torch.Tensor]) -> Linear:
    return [(0, 1)]


_pointwise(_NONLINEAR, _never)
_pointwise(_LINEAR_IN_FIRST, _in_first)
_pointwise(_LINEAR_BETWEEN_POLES, _in_first, second=OperandCondition.NEVER)
_pointwise(_LINEAR_AND_BOUNDED, _in_first, second=OperandCondition.ANYTHING)
_pointwise("true_divide.Tensor", _in_first, second=OperandCondition.NOT_ZERO)
_pointwise(_INCREASING, _never, increasing((0,)))
_pointwise(_DECREASING, _never, decreasing((0,)))
_pointwise(_MASKING_BACKWARDS, _in_first, moving((0,)), OperandCondition.ANYTHING)
_pointwise(_INCREASING_ABOVE, _never, minima((0,)))
_pointwise("rsqrt", _never, [carry for carry in decreasing((0,)) if carry.reduction is Reduction.MIN])
_pointwise("complex.default", _in_both)
_pointwise("square", _never, products((0,)))
_pointwise("copysign.Tensor", _never, increasing((1,)))
_pointwise("nextafter bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar", _never, increasing((0,)))
_pointwise("heaviside", _never, moving((1,)))
_pointwise("max.other maximum clamp_min.Tensor", _never, [*increasing((0,), (1,)), *maxima((0, 1))])
_pointwise("min.other minimum clamp_max.Tensor", _never, [*increasing((0,), (1,)), *minima((0, 1))])
_pointwise("logaddexp logaddexp2", _never, increasing((0,), (1,)))
_pointwise("conj_physical _conj_physical _conj resolve_conj resolve_neg", _in_first, moving((0,)))
_pointwise("deg2rad rad2deg", _in_first, increasing((0,)))


# Operators whose rules depend on numbers or types among the arguments.


def _if(condition: bool, carries: list[Carry]) -> list[Carry]:
    return carries if condition else []


def _of_floats(x: torch.Tensor, carries: list[Carry]) -> list[Carry]:
    """Return `carries` if `x` has floats or complex numbers, else none: integer products overflow; 0 has no sign."""
    return _if(x.is_floating_point() or x.is_complex(), carries)


@sharding_rule(aten.abs.default, aten.reciprocal.default)
def magnitude(x: torch.Tensor) -> Rule:
    return _rule([x], (), _of_floats(x, products((0,))))


@sharding_rule(aten.sgn.default, aten.sign.default)
def sign(x: torch.Tensor) -> Rule:
    """Return the rule of the sign, which is 0 for NaN, so that partial extremes of floats do not pass."""
    return _rule([x], (), _of_floats(x, products((0,))) or increasing((0,)))


@sharding_rule(aten.neg.default)
def neg(x: torch.Tensor) -> Rule:
    """Return the rule of -x. Partial maxima of integers do not pass, because the least integer has no negative."""
    return _rule([x], _in_first([x]), _if(x.is_floating_point(), decreasing((0,))))


@sharding_rule(aten.mul.Scalar)
def scale(x: torch.Tensor, other: Any) -> Rule:
    return _scaled(x, other, is_linear=are_finite(other))


@sharding_rule(aten.div.Scalar)
def scale_down(x: torch.Tensor, other: Any) -> Rule:
    return _scaled(x, other, is_linear=other != 0)


def _scaled(x: torch.Tensor, other: Any, *, is_linear: bool) -> Rule:
    carries = _if(x.is_floating_point(), scaled(other, 0))
    return _rule([x], _in_first([x]) if is_linear else (), [*carries, *_if(other == 1, products((0,)))])


@sharding_rule(aten.xlogy.Scalar_Other, aten.special_xlog1py.other_scalar)
def scale_by_logarithm(x: torch.Tensor, other: Any) -> Rule:
    """Return the rule of x log(other) or x log(1 + other), linear in `x` if `other` is positive and finite."""
    return _rule([x], _in_first([x]) if are_finite(other) and other > 0 else ())


@sharding_rule(aten.mul.Tensor)
def mul(x: torch.Tensor, other: Any) -> Rule:
    if not isinstance(other, torch.Tensor):
        return scale(x, other)
    masked = [[index] for index, mask in enumerate((other, x)) if mask.dtype == torch.bool]
    return _rule([x, other], _in_either([x, other]), products((0, 1), *masked))


@sharding_rule(aten.div.Tensor)
def div(x: torch.Tensor, other: Any) -> Rule:
    if not isinstance(other, torch.Tensor):
        return scale_down(x, other)
    carries = _of_floats(other, _of_floats(x, products((0, 1))))
    return _rule([x, other], _in_first([x]), carries, {1: OperandCondition.NOT_ZERO})


@sharding_rule(aten.div.Scalar_mode)
def scale_rounded(x: torch.Tensor, other: Any, *, rounding_mode: str | None) -> Rule:
    """Return the rule of x / other, rounded. Floors do not pass extremes: floor(inf / 2) is NaN in torch."""
    return _rule([x], (), _if(x.is_floating_point() and rounding_mode != "floor", scaled(other, 0)))


def _keeps_type(x: torch.Tensor, number: Any) -> bool:
    """Whether arithmetic of `x` with a number keeps the dtype of `x`, so that sums of integers wrap round as in `x`."""
    return x.is_floating_point() or x.is_complex() or isinstance(number, int)


def _is_finite(number: Any) -> bool:
    return isinstance(number, int | float) and math.isfinite(number)


@sharding_rule(aten.add.Scalar, aten.sub.Scalar)
def shift(x: torch.Tensor, other: Any, alpha: Any = 1) -> Rule:
    """Return the rule of a sum or difference of `x` and the number `other`.

    Partial sums pass only for the number 0, because each rank adds the number. Partial maxima of integers do not pass.
    A rank without elements has the least integer as its maximum, and the sum may wrap round.
    """
    if other == 0 and _keeps_type(x, other):
        return _rule([x], _in_first([x]), moving((0,)))
    return _rule([x], (), _if(x.is_floating_point() and _is_finite(other), increasing((0,))))


@sharding_rule(aten.rsub.Scalar)
def shift_negated(x: torch.Tensor, other: Any, alpha: Any = 1) -> Rule:
    return _rule([x], (), _if(x.is_floating_point() and _is_finite(other), scaled(-alpha, 0)))


@sharding_rule(aten.add.Tensor)
def add(x: torch.Tensor, other: Any, *, alpha: Any = 1) -> Rule:
    return _sum(x, other, 1, alpha)


@sharding_rule(aten.sub.Tensor)
def sub(x: torch.Tensor, other: Any, *, alpha: Any = 1) -> Rule:
    return _sum(x, other, 1, -alpha)


@sharding_rule(aten.rsub.Tensor)
def rsub(x: torch.Tensor, other: Any, *, alpha: Any = 1) -> Rule:
    return _sum(x, other, -alpha, 1)


def _sum(x: torch.Tensor, other: Any, scale: Any, other_scale: Any) -> Rule:
    """Return the rule of scale x + other_scale other, for two tensors, or for a tensor and a number in either order.

    With a number, partial maxima and minima of floats pass. With two tensors, partial maxima of either pass if both
    scales have the same sign, else partial minima. The other kind could give NaN: a tensor may contain -inf (a mask),
    and a rank without elements has +inf as its minimum.
    """
    if not isinstance(other, torch.Tensor):
        is_ordered = x.is_floating_point() and _is_finite(other)
        return shift(x, other) if scale == 1 else _rule([x], (), _if(is_ordered, scaled(scale, 0)))
    if not isinstance(x, torch.Tensor):
        is_ordered = other.is_floating_point() and _is_finite(x)
        return _rule([other], (), _if(is_ordered, scaled(other_scale, 0)))
    is_real = all(isinstance(factor, int | float) for factor in (scale, other_scale))
    awaited = Reduction.MAX if is_real and (scale > 0) == (other_scale > 0) else Reduction.MIN
    carries = [carry for carry in [*scaled(scale, 0), *scaled(other_scale, 1)] if carry.reduction is awaited]
    linear = [(0, 1)] if is_additive(x, other) and are_finite(scale, other_scale) else ()
    return _rule([x, other], linear, _if(x.is_floating_point() and other.is_floating_point(), carries))


@sharding_rule(aten.lerp.Scalar)
def lerp_by_number(start: torch.Tensor, end: torch.Tensor, weight: Any) -> Rule:
    return _rule([start, end], [(0, 1)] if are_finite(weight) else ())


@sharding_rule(aten.pow.Tensor_Scalar)
def power(x: torch.Tensor, exponent: Any) -> Rule:
    """Return the rule of x^exponent. All partial values pass for the exponent 1.

    Partial products pass for whole exponents except 0. Partial maxima and minima of floats pass for odd exponents > 0.
    """
    number = 0.0 if isinstance(exponent, complex) else float(exponent)
    is_whole = number.is_integer() and number != 0
    is_odd = is_whole and number > 0 and number % 2 == 1
    if number == 1 and _keeps_type(x, exponent):
        return _rule([x], _in_first([x]), moving((0,)))
    return _rule([x], (), [*_if(is_whole, products((0,))), *_if(is_odd and x.is_floating_point(), increasing((0,)))])


@sharding_rule(aten.pow.Scalar)
def exponential(base: Any, exponent: torch.Tensor) -> Rule:
    """Return the rule of base^exponent. It increases with `exponent` if `base` is at least 1, and else decreases."""
    if not exponent.is_floating_point() or not _is_finite(base) or base <= 0:
        return _rule([exponent])
    return _rule([exponent], (), increasing((0,)) if base >= 1 else decreasing((0,)))


@sharding_rule(aten.clamp.Tensor, aten.clip.Tensor)
def clamp(x: torch.Tensor, min: torch.Tensor | None = None, max: torch.Tensor | None = None) -> Rule:
    """Return the rule of min(max(x, low), high), where low is `min` and high is `max`.

    Any one operand may be a partial maximum or minimum. `x` and low may be partial maxima together. `x` and high, or
    low and high, may be partial minima together.
    """
    low = () if min is None else (1,)
    high = () if max is None else (1 + len(low),)
    alone = increasing(*(group for group in ((0,), low, high) if group))
    together = [
        *_if(bool(low), maxima((0, *low))),
        *_if(bool(high), minima((0, *high))),
        *_if(bool(low and high), minima((*low, *high))),
    ]
    return _rule(tensors(x, min, max), (), [*alone, *together])


@sharding_rule(aten.elu.default)
def elu(x: torch.Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Rule:
    return _rule([x], (), _if(alpha >= 0 and scale > 0 and input_scale > 0, increasing((0,))))


@sharding_rule(aten.elu_backward.default)
def elu_backward(
    grad: torch.Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: torch.Tensor
) -> Rule:
    return _rule([grad, x], [(0,)], (), {1: OperandCondition.FINITE if is_result else OperandCondition.ANYTHING})


@sharding_rule(aten.softplus.default)
def softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> Rule:
    """Return the rule of softplus. Partial maxima and minima pass if rounding hides its step at the threshold.

    Above the threshold the result is `x`, which is less than the softplus by the share log(1 + exp(-threshold)) /
    threshold. So the result steps down. Rounding to float32 hides the step for thresholds from 20 on.
    """
    step = math.log1p(math.exp(-threshold)) / threshold if threshold >= 20 else math.inf
    is_hidden = x.is_floating_point() and step < torch.finfo(x.dtype).eps / 4
    return _rule([x], (), _if(beta > 0 and is_hidden, increasing((0,))))


@sharding_rule(aten.leaky_relu.default)
def leaky_relu(x: torch.Tensor, negative_slope: float = 0.01) -> Rule:
    return _rule([x], (), _if(negative_slope > 0, increasing((0,))))


@sharding_rule(aten.leaky_relu_backward.default)
def leaky_relu_backward(grad: torch.Tensor, x: torch.Tensor, negative_slope: float, is_result: bool) -> Rule:
    linear = [(0,)] if are_finite(negative_slope) else ()
    return _rule([grad, x], linear, _if(negative_slope > 0, increasing((0,))), {1: OperandCondition.ANYTHING})


@sharding_rule(aten.native_dropout_backward.default)
def native_dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> Rule:
    return _rule([grad, mask], [(0,)] if are_finite(scale) else ())


@sharding_rule(aten.threshold.default)
def threshold(x: torch.Tensor, threshold: Any, value: Any) -> Rule:
    return _rule([x], (), _if(value <= threshold, increasing((0,))))


# Copies and choices.


@sharding_rule(*_overloads(_COPIES))
def copy(x: torch.Tensor, **kwargs: Any) -> Rule:
    return Rule(elementwise([x.shape]), transparent=True)


@sharding_rule(aten.copy.default)
def copy_onto(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Rule:
    linear = [(1,)] if keeps_sums(source.dtype, x.dtype) else ()
    return _rule([x, source], linear, through_conversion(source.dtype, x.dtype, 1), {0: OperandCondition.ANYTHING})


@sharding_rule(aten._to_copy.default)
def to_copy(x: torch.Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Rule:
    target = dtype or x.dtype
    if keeps_sums(x.dtype, target) and not x.is_complex() and not target.is_complex:
        return Rule(elementwise([x.shape]), transparent=True)
    return _rule([x], [(0,)] if keeps_sums(x.dtype, target) else (), through_conversion(x.dtype, target, 0))


@sharding_rule(aten.where.self)
def where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Rule:
    carries = [*increasing((1,), (2,)), *moving((1, 2))]
    return _rule([condition, a, b], [(1, 2)] if is_additive(a, b) else (), carries)


@sharding_rule(aten.where.ScalarOther)
def where_other(condition: torch.Tensor, a: torch.Tensor, b: float) -> Rule:
    return _rule([condition, a], [(1,)] if b == 0 and is_additive(a) else (), _beside(b, 1))


@sharding_rule(aten.where.ScalarSelf)
def where_self(condition: torch.Tensor, a: float, b: torch.Tensor) -> Rule:
    return _rule([condition, b], [(1,)] if a == 0 and is_additive(b) else (), _beside(a, 1))


def _beside(number: Any, operand: int) -> list[Carry]:
    """Return carries through operand number `operand`, some elements of which the call replaces by `number`."""
    return [*increasing((operand,)), *_if(number in (0, 1), products((operand,)))]


@sharding_rule(aten.where.Scalar)
def where_scalars(condition: torch.Tensor, a: float, b: float) -> Rule:
    if any(number != number or isinstance(number, complex) for number in (a, b)):
        return _rule([condition])
    return _rule([condition], (), increasing((0,)) if a >= b else decreasing((0,)))


@sharding_rule(aten.masked_fill.Scalar)
def masked_fill(x: torch.Tensor, mask: torch.Tensor, value: float) -> Rule:
    return _rule([x, mask], [(0,)] if value == 0 and is_additive(x) else (), _beside(value, 0))


@sharding_rule(aten.masked_fill.Tensor)
def masked_fill_tensor(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Rule:
    carries = [*increasing((0,), (2,)), *moving((0, 2))]
    return _rule([x, mask, value], [(0, 2)] if is_additive(x, value) else (), carries)


@sharding_rule(aten.lerp.Tensor)
def lerp(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> Rule:
    return _rule([start, end, weight], [(0, 1)])


@sharding_rule(aten.addcmul.default)
def addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: float = 1) -> Rule:
    linear = [(0, 1), (0, 2)] if is_additive(x, a, b) and are_finite(value) else ()
    return _rule([x, a, b], linear, increasing_addend(x, a, b, operand=0))


@sharding_rule(aten.addcdiv.default)
def addcdiv(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: float = 1) -> Rule:
    linear = [(0, 1)] if is_additive(x, a) and are_finite(value) else ()
    return _rule([x, a, b], linear, increasing_addend(x, a, b, operand=0), {2: OperandCondition.NOT_ZERO})


@sharding_rule(aten.fill.Tensor)
def fill_tensor(x: torch.Tensor, value: torch.Tensor) -> Rule:
    """Return the rule of `fill`, which is linear in `value`. Only the shape and dtype of `x` matter."""
    linear = [(1,)] if keeps_sums(value.dtype, x.dtype) else ()
    return _rule([x, value], linear, through_conversion(value.dtype, x.dtype, 1), {0: OperandCondition.ANYTHING})


@sharding_rule(aten.fill.Scalar)
def fill_scalar(x: torch.Tensor, value: float) -> Rule:
    return Rule(elementwise([x.shape]), linear=[()] if value == 0 else ())
