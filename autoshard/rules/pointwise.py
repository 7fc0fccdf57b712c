"""Rules of operators that act on each element independently, after broadcasting.

Any dim may be split. Rules differ in the operands through which a partial sum passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from autoshard.kernels.offload import TRANSFERS
from autoshard.rules.dims import all_blocked, are_finite, elementwise, keeps_sums
from autoshard.rules.notation import OperandCondition, Rule
from autoshard.rules.registry import sharding_rule, tensor_operands

aten = torch.ops.aten

Linear = Sequence[Sequence[int]]

# Operators of aten that no partial sum passes. "eq" stands for all functional overloads of the operator.
_NONLINEAR = """
    __lshift__ __rshift__ __xor__ __and__ __or__ abs acos acosh angle asin asinh atan atan2 atanh bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip
    copysign cos cosh digamma div.Scalar_mode div.Tensor_mode elu eq erf erfc erfinv exp exp2 expm1 float_power floor
    floor_divide fmax fmin fmod frac gcd ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma
    igammac isfinite isinf isnan isneginf isposinf lcm le leaky_relu lgamma log log10 log1p log2 logaddexp logaddexp2
    logical_and logical_not logical_or logical_xor logit lt max.other maximum min.other minimum mish mvlgamma
    nan_to_num ne nextafter polygamma pow reciprocal relu relu6 remainder round rsqrt rsub.Scalar selu sgn sigmoid sign
    signbit silu sin sinc sinh softplus softshrink special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr special_erfcx
    special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1 special_i1e
    special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr _standard_gamma_grad _dirichlet_grad
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
    special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0
    special_zeta sqrt square tan tanh threshold trunc where.Scalar _prelu_kernel xlogy.Scalar_Self
    special_xlog1py.self_scalar
"""

# Operators that are linear in the first operand: scalings, and backwards, which are linear in the gradient.
_LINEAR_IN_FIRST = """
    neg real imag _neg_view conj_physical _conj_physical _conj resolve_conj resolve_neg deg2rad rad2deg
    sigmoid_backward tanh_backward rrelu_with_noise_backward
"""

# Linear in the first operand, with a factor that is infinite for some finite second operand.
_LINEAR_BETWEEN_POLES = "ldexp.Tensor xlogy.Tensor special_xlog1py.default logit_backward"

# Linear in the first operand, with a factor that is bounded for any second operand.
_LINEAR_AND_BOUNDED = """
    polar gelu_backward silu_backward hardswish_backward mish_backward softplus_backward hardsigmoid_backward
    threshold_backward hardtanh_backward softshrink_backward hardshrink_backward
"""

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


def _pointwise(names: str, linear: Linear = (), second: OperandCondition = OperandCondition.FINITE) -> None:
    """Register the rule of the pointwise operators in `names` (`_overloads`).

    `linear` is `Rule.linear`. `second` is the condition on the second operand under which a partial sum passes through
    the first.
    """

    @sharding_rule(*_overloads(names))
    def rule(*args: Any, **kwargs: Any) -> Rule | None:
        operands = tensor_operands(args, kwargs)
        return _rule(operands, linear, {1: second}) if operands else None


def _rule(
    operands: Sequence[torch.Tensor], linear: Linear = (), beside: Mapping[int, OperandCondition] | None = None
) -> Rule:
    return Rule(elementwise([operand.shape for operand in operands]), linear=linear, beside=beside)


_FIRST = ((0,),)

_pointwise(_NONLINEAR)
_pointwise(_LINEAR_IN_FIRST, _FIRST)
_pointwise(_LINEAR_BETWEEN_POLES, _FIRST, OperandCondition.NEVER)
_pointwise(_LINEAR_AND_BOUNDED, _FIRST, OperandCondition.ANYTHING)
_pointwise("true_divide.Tensor", _FIRST, OperandCondition.NOT_ZERO)
_pointwise("complex.default", [(0, 1)])


# Operators whose rules depend on numbers or types among the arguments.


@sharding_rule(aten.mul.Scalar)
def scale(x: torch.Tensor, other: Any) -> Rule:
    return _rule([x], _FIRST if are_finite(other) else ())


@sharding_rule(aten.div.Scalar)
def scale_down(x: torch.Tensor, other: Any) -> Rule:
    return _rule([x], _FIRST if other != 0 else ())


@sharding_rule(aten.xlogy.Scalar_Other, aten.special_xlog1py.other_scalar)
def scale_by_logarithm(x: torch.Tensor, other: Any) -> Rule:
    """Return the rule of x log(other) or x log(1 + other), linear in `x` if `other` is positive and finite."""
    return _rule([x], _FIRST if are_finite(other) and other > 0 else ())


@sharding_rule(aten.mul.Tensor)
def mul(x: torch.Tensor, other: Any) -> Rule:
    if not isinstance(other, torch.Tensor):
        return scale(x, other)
    return _rule([x, other], [(0,), (1,)])


@sharding_rule(aten.div.Tensor)
def div(x: torch.Tensor, other: Any) -> Rule:
    if not isinstance(other, torch.Tensor):
        return scale_down(x, other)
    return _rule([x, other], _FIRST, {1: OperandCondition.NOT_ZERO})


@sharding_rule(aten.add.Scalar, aten.sub.Scalar)
def shift(x: torch.Tensor, other: Any, alpha: Any = 1) -> Rule:
    """Return the rule of a sum or difference of `x` and the number `other`.

    Partial sums pass only for the number 0, because each rank adds the number.
    """
    keeps_type = x.is_floating_point() or x.is_complex() or isinstance(other, int)
    return _rule([x], _FIRST if other == 0 and keeps_type else ())


@sharding_rule(aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor)
def add(x: Any, other: Any, *, alpha: Any = 1) -> Rule:
    """Return the rule of a sum or difference of two tensors, or of a tensor and a number in either order."""
    if not isinstance(other, torch.Tensor):
        return shift(x, other)
    if not isinstance(x, torch.Tensor):
        return _rule([other])
    return _rule([x, other], [(0, 1)] if are_finite(alpha) else ())


@sharding_rule(aten.lerp.Scalar)
def lerp_by_number(start: torch.Tensor, end: torch.Tensor, weight: Any) -> Rule:
    return _rule([start, end], [(0, 1)] if are_finite(weight) else ())


@sharding_rule(aten.elu_backward.default)
def elu_backward(
    grad: torch.Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: torch.Tensor
) -> Rule:
    return _rule([grad, x], [(0,)], {1: OperandCondition.FINITE if is_result else OperandCondition.ANYTHING})


@sharding_rule(aten.leaky_relu_backward.default)
def leaky_relu_backward(grad: torch.Tensor, x: torch.Tensor, negative_slope: float, is_result: bool) -> Rule:
    return _rule([grad, x], [(0,)] if are_finite(negative_slope) else (), {1: OperandCondition.ANYTHING})


@sharding_rule(aten.native_dropout_backward.default)
def native_dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> Rule:
    return _rule([grad, mask], [(0,)] if are_finite(scale) else ())


# Copies and choices.


@sharding_rule(*_overloads(_COPIES), *TRANSFERS)
def copy(x: torch.Tensor, **kwargs: Any) -> Rule:
    return Rule(elementwise([x.shape]), transparent=True)


@sharding_rule(aten.copy.default, aten.fill.Tensor)
def copy_onto(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Rule:
    """Return the rule of a call that fills `x` from `source`. Only the shape and dtype of `x` matter."""
    linear = [(1,)] if keeps_sums(source.dtype, x.dtype) else ()
    return _rule([x, source], linear, {0: OperandCondition.ANYTHING})


@sharding_rule(aten._to_copy.default)
def to_copy(x: torch.Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Rule:
    target = dtype or x.dtype
    if keeps_sums(x.dtype, target) and not x.is_complex() and not target.is_complex:
        return Rule(elementwise([x.shape]), transparent=True)
    return _rule([x], [(0,)] if keeps_sums(x.dtype, target) else ())


@sharding_rule(aten.where.self)
def where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Rule:
    return _rule([condition, a, b], [(1, 2)])


@sharding_rule(aten.where.ScalarOther)
def where_other(condition: torch.Tensor, a: torch.Tensor, b: float) -> Rule:
    return _rule([condition, a], [(1,)] if b == 0 else ())


@sharding_rule(aten.where.ScalarSelf)
def where_self(condition: torch.Tensor, a: float, b: torch.Tensor) -> Rule:
    return _rule([condition, b], [(1,)] if a == 0 else ())


@sharding_rule(aten.masked_fill.Scalar)
def masked_fill(x: torch.Tensor, mask: torch.Tensor, value: float) -> Rule:
    return _rule([x, mask], [(0,)] if value == 0 else ())


@sharding_rule(aten.masked_fill.Tensor)
def masked_fill_tensor(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Rule:
    return _rule([x, mask, value], [(0, 2)])


@sharding_rule(aten.lerp.Tensor)
def lerp(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> Rule:
    return _rule([start, end, weight], [(0, 1)])


@sharding_rule(aten.addcmul.default)
def addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: float = 1) -> Rule:
    return _rule([x, a, b], [(0, 1), (0, 2)] if are_finite(value) else ())


@sharding_rule(aten.addcdiv.default)
def addcdiv(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: float = 1) -> Rule:
    linear = [(0, 1)] if are_finite(value) else ()
    return _rule([x, a, b], linear, {2: OperandCondition.NOT_ZERO})


@sharding_rule(aten.fill.Scalar)
def fill_scalar(x: torch.Tensor, value: float) -> Rule:
    return Rule(elementwise([x.shape]), linear=[()] if value == 0 else ())


# Operators with several results, or with an operand of other dims than the result.


@sharding_rule(aten._prelu_kernel_backward.default)
def prelu_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Rule:
    return Rule(elementwise([grad.shape, x.shape, weight.shape], results=2), linear=[(0,)])


@sharding_rule(aten.frexp.Tensor)
def frexp(x: torch.Tensor) -> Rule:
    return Rule(elementwise([x.shape], results=2))


@sharding_rule(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(grad: torch.Tensor, x: torch.Tensor, buffer: torch.Tensor) -> Rule | None:
    """Return the rule of the backward of log-sigmoid.

    The forward's `buffer` has the shape of `x` on a CPU, and is empty on a GPU.
    """
    (x_dims,), results = elementwise([x.shape])
    buffer_dims = x_dims if buffer.shape == x.shape else all_blocked(buffer.dim())
    beside: dict[int, OperandCondition] = {1: OperandCondition.ANYTHING, 2: OperandCondition.ANYTHING}
    return Rule(((x_dims, x_dims, buffer_dims), results), linear=[(0,)], beside=beside)


@sharding_rule(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(x: torch.Tensor) -> Rule | None:
    (dims,), _ = elementwise([x.shape])
    buffer_dims = all_blocked(1) if x.device.type == "cuda" else dims
    return Rule(((dims,), (dims, buffer_dims)))


@sharding_rule(aten.bucketize.Tensor)
def bucketize(x: torch.Tensor, boundaries: torch.Tensor, **kwargs: Any) -> Rule:
    (dims,), results = elementwise([x.shape])
    return Rule(((dims, all_blocked(1)), results))
