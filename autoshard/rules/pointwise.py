"""Rules of operators that act on each element by itself, after broadcasting.

Any dim may be split. What differs is linearity: in which operands a partial sum passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autoshard.rules.dims import all_blocked, elementwise, is_additive
from autoshard.rules.notation import Rule
from autoshard.rules.registry import sharding_rule, tensor_operands

aten = torch.ops.aten

Linear = Sequence[Sequence[int]]

# Overloads are named once; a packet stands for all its functional overloads.
_NONLINEAR = """
    __lshift__ __rshift__ __xor__ __and__ __or__ abs acos acosh angle asin asinh atan atan2 atanh bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max
    clamp_min clip copysign cos cosh digamma elu eq erf erfc erfinv exp exp2 expm1 float_power floor
    floor_divide fmax fmin fmod frac gcd ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot
    i0 igamma igammac isfinite isinf isnan isneginf isposinf lcm le leaky_relu lgamma log log10 log1p log2
    logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt max.other maximum min.other
    minimum mish nan_to_num ne nextafter polygamma pow reciprocal relu relu6 remainder round rsqrt selu sgn
    sigmoid sign signbit silu sin sinc sinh softplus softshrink special_airy_ai special_bessel_j0
    special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr
    special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1
    special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta sqrt square tan tanh
    threshold trunc add.Scalar sub.Scalar rsub.Scalar div.Tensor_mode div.Scalar_mode _prelu_kernel
    xlogy.Scalar_Self special_xlog1py.self_scalar
"""

# In the first operand, with the others fixed: scalings, and backwards, which are linear in the gradient.
_LINEAR_IN_FIRST = """
    neg mul.Scalar div.Tensor div.Scalar true_divide.Tensor deg2rad rad2deg ldexp.Tensor xlogy.Tensor xlogy.Scalar_Other
    special_xlog1py.default special_xlog1py.other_scalar
    real imag conj_physical _conj_physical _conj _neg_view resolve_conj resolve_neg polar
    sigmoid_backward tanh_backward gelu_backward silu_backward threshold_backward elu_backward hardswish_backward
    hardsigmoid_backward hardtanh_backward leaky_relu_backward softplus_backward softshrink_backward hardshrink_backward
    mish_backward logit_backward native_dropout_backward
"""

_IN_EITHER = "mul.Tensor"
_JOINTLY = "add.Tensor sub.Tensor rsub.Tensor complex.default lerp.Scalar"
_COPIES = "clone contiguous alias alias_copy detach detach_copy positive lift_fresh_copy lift_fresh"


def _overloads(names: str) -> Iterator[Any]:
    """The functional overloads that `names` stand for ("pow" for all of them, "max.other" for one)."""
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


def _pointwise(names: str, linear: Callable[[Sequence[torch.Tensor]], Linear]) -> None:
    """Register the pointwise rule for `names`, with linearity as a function of the tensor operands."""

    @sharding_rule(*_overloads(names))
    def rule(*args: Any, **kwargs: Any) -> Rule | None:
        operands = tensor_operands(args, kwargs)
        if not operands:
            return None
        return Rule(elementwise([operand.shape for operand in operands]), linear=linear(operands))


def _never(operands: Sequence[torch.Tensor]) -> Linear:
    return ()


def _in_first(operands: Sequence[torch.Tensor]) -> Linear:
    return [(0,)] if is_additive(operands[0]) else ()


def _in_either(operands: Sequence[torch.Tensor]) -> Linear:
    return [(index,) for index, operand in enumerate(operands) if is_additive(operand)]


def _jointly(operands: Sequence[torch.Tensor]) -> Linear:
    """Only if both operands are tensors: a number would be added once per rank."""
    return [(0, 1)] if len(operands) == 2 and is_additive(*operands) else ()


_pointwise(_NONLINEAR, _never)
_pointwise(_LINEAR_IN_FIRST, _in_first)
_pointwise(_IN_EITHER, _in_either)
_pointwise(_JOINTLY, _jointly)


@sharding_rule(*_overloads(_COPIES))
def copy(x: torch.Tensor, **kwargs: Any) -> Rule:
    return Rule(elementwise([x.shape]), transparent=True)


@sharding_rule(aten.copy.default)
def copy_onto(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Rule:
    return Rule(elementwise([x.shape, source.shape]), linear=[(1,)] if _keeps_sums(source.dtype, x.dtype) else ())


@sharding_rule(aten._to_copy.default)
def to_copy(x: torch.Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Rule:
    target = dtype or x.dtype
    keeps_sums = _keeps_sums(x.dtype, target)
    linear = [(0,)] if keeps_sums and target.is_complex else ()
    return Rule(elementwise([x.shape]), transparent=keeps_sums and not target.is_complex, linear=linear)


def _keeps_sums(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether converting addends converts their reduction: not where it rounds to integers or to booleans."""
    if source == target:
        return True
    return source != torch.bool and (target.is_floating_point or target.is_complex)


@sharding_rule(aten.where.self)
def where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Rule:
    shapes = [condition.shape, a.shape, b.shape]
    return Rule(elementwise(shapes), linear=[(1, 2)] if is_additive(a, b) else ())


@sharding_rule(aten.where.ScalarOther)
def where_other(condition: torch.Tensor, a: torch.Tensor, b: float) -> Rule:
    return Rule(elementwise([condition.shape, a.shape]), linear=[(1,)] if b == 0 and is_additive(a) else ())


@sharding_rule(aten.where.ScalarSelf)
def where_self(condition: torch.Tensor, a: float, b: torch.Tensor) -> Rule:
    return Rule(elementwise([condition.shape, b.shape]), linear=[(1,)] if a == 0 and is_additive(b) else ())


@sharding_rule(aten.where.Scalar)
def where_scalars(condition: torch.Tensor, a: float, b: float) -> Rule:
    return Rule(elementwise([condition.shape]))


@sharding_rule(aten.masked_fill.Scalar)
def masked_fill(x: torch.Tensor, mask: torch.Tensor, value: float) -> Rule:
    return Rule(elementwise([x.shape, mask.shape]), linear=[(0,)] if value == 0 and is_additive(x) else ())


@sharding_rule(aten.masked_fill.Tensor)
def masked_fill_tensor(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Rule:
    shapes = [x.shape, mask.shape, value.shape]
    return Rule(elementwise(shapes), linear=[(0, 2)] if is_additive(x, value) else ())


@sharding_rule(aten.lerp.Tensor)
def lerp(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> Rule:
    return Rule(elementwise([start.shape, end.shape, weight.shape]), linear=[(0, 1)])


@sharding_rule(aten.addcmul.default)
def addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: float = 1) -> Rule:
    linear = [(0, 1), (0, 2)] if is_additive(x, a, b) else ()
    return Rule(elementwise([x.shape, a.shape, b.shape]), linear=linear)


@sharding_rule(aten.addcdiv.default)
def addcdiv(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: float = 1) -> Rule:
    return Rule(elementwise([x.shape, a.shape, b.shape]), linear=[(0, 1)] if is_additive(x, a) else ())


@sharding_rule(aten._prelu_kernel_backward.default)
def prelu_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Rule:
    return Rule(elementwise([grad.shape, x.shape, weight.shape], results=2), linear=[(0,)])


@sharding_rule(aten.frexp.Tensor)
def frexp(x: torch.Tensor) -> Rule:
    return Rule(elementwise([x.shape], results=2))


@sharding_rule(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(grad: torch.Tensor, x: torch.Tensor, buffer: torch.Tensor) -> Rule | None:
    """The buffer of the forward has the shape of `x` on a CPU and is empty on a GPU."""
    (x_dims,), results = elementwise([x.shape])
    buffer_dims = x_dims if buffer.shape == x.shape else all_blocked(buffer.dim())
    return Rule(((x_dims, x_dims, buffer_dims), results), linear=[(0,)])


@sharding_rule(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(x: torch.Tensor) -> Rule | None:
    (dims,), _ = elementwise([x.shape])
    buffer_dims = all_blocked(1) if x.device.type == "cuda" else dims
    return Rule(((dims,), (dims, buffer_dims)))


@sharding_rule(aten.bucketize.Tensor)
def bucketize(x: torch.Tensor, boundaries: torch.Tensor, **kwargs: Any) -> Rule:
    (dims,), results = elementwise([x.shape])
    return Rule(((dims, (("_",),)), results))


@sharding_rule(aten.fill.Tensor)
def fill_tensor(x: torch.Tensor, value: torch.Tensor) -> Rule:
    """The values of `x` do not matter, only its shape."""
    return Rule(elementwise([x.shape, value.shape]), linear=[(1,)] if _keeps_sums(value.dtype, x.dtype) else ())


@sharding_rule(aten.fill.Scalar)
def fill_scalar(x: torch.Tensor, value: float) -> Rule:
    return Rule(elementwise([x.shape]), linear=[()] if value == 0 else ())
