"""Tables of the ATen operators that generated kernels compute, with the Triton expression of each operator.

Inside a kernel, numbers of any floating dtype are float32. A value is rounded to a 16-bit dtype where the program
converts it, and where the kernel stores it. An operator outside the tables is not fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload

from autoshard.kernels.generated.group import GroupStep, Ref, ValueShape

_aten = torch.ops.aten

TRITON_TYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float32: "tl.float32",
        torch.bfloat16: "tl.float32",
        torch.float16: "tl.float32",
        torch.int64: "tl.int64",
        torch.int32: "tl.int32",
        torch.bool: "tl.int1",
    }
)
"""From a dtype to the Triton type of its values inside a kernel. Other dtypes are not supported."""

_STORED = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}


class IndexKind(Enum):
    """How the indices of an operator's operands relate to the indices of its result."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    VIEW = "view"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Pointwise:
    """An operator that computes each element from the operands' elements at the same index.

    Args:
        write: takes the operator's arguments by name, with tensors and numbers as Triton expressions. Returns the
            expression of the result, or None if these arguments have none.
        compares: whether the operator computes in the common dtype of its operands, not in the dtype of its result.
        is_costly: whether a kernel should compute the operator only once for each element.
    """

    write: Callable[..., str | None]
    compares: bool = False
    is_costly: bool = False


POINTWISE: dict[OpOverload, Pointwise] = {}


def _pointwise(*targets: OpOverload, compares: bool = False, is_costly: bool = False) -> Callable[..., Any]:
    def register(write: Callable[..., str | None]) -> Callable[..., str | None]:
        for target in targets:
            POINTWISE[target] = Pointwise(write, compares, is_costly)
        return write

    return register


def _call_table(table: Mapping[OpOverload, str], **options: bool) -> None:
    """Add operators to `POINTWISE`, each with a template of its Triton expression.

    In a template, {x} is the first operand, a tensor. {y} is the second operand, a tensor or a number.
    """
    for target, template in table.items():

        def write(self: str, other: str = "", template: str = template, **_: object) -> str:
            return template.format(x=self, y=other)

        POINTWISE[target] = Pointwise(write, **options)


_call_table(
    {
        _aten.mul.Tensor: "{x} * {y}",
        _aten.mul.Scalar: "{x} * {y}",
        _aten.neg.default: "-{x}",
        _aten.reciprocal.default: "1.0 / {x}",
        _aten.abs.default: "tl.abs({x})",
        _aten.relu.default: "tl.where({x} <= 0.0, 0.0, {x})",
        _aten.maximum.default: "larger({x}, {y})",
        _aten.minimum.default: "smaller({x}, {y})",
        _aten.square.default: "{x} * {x}",
    }
)
_call_table(
    {
        _aten.exp.default: "tl.exp({x})",
        _aten.log.default: "tl.log({x})",
        _aten.sqrt.default: "tl.sqrt({x})",
        _aten.rsqrt.default: "tl.rsqrt({x})",
        _aten.tanh.default: "tanh({x})",
        _aten.erf.default: "tl.erf({x})",
        _aten.sigmoid.default: "tl.sigmoid({x})",
        _aten.silu.default: 'activate({x}, "silu")',
    },
    is_costly=True,
)
_call_table(
    {
        getattr(getattr(_aten, name), overload): f"{{x}} {sign} {{y}}"
        for name, sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items()
        for overload in ("Tensor", "Scalar")
    },
    compares=True,
)
_call_table(
    {
        getattr(getattr(_aten, f"{word}_{name}"), overload): f"{{x}} {sign} {{y}}"
        for name, sign in {"and": "&", "or": "|", "xor": "^"}.items()
        for word, overload in (("logical", "default"), ("bitwise", "Tensor"))
    }
)


@_pointwise(_aten.div.Tensor, _aten.div.Scalar)
def _div(self: str, other: str) -> str:
    return f"{self} / {other}"


@_pointwise(_aten.add.Tensor, _aten.add.Scalar)
def _add(self: str, other: str, alpha: str) -> str:
    return f"{self} + {_times(alpha, other)}"


@_pointwise(_aten.sub.Tensor, _aten.sub.Scalar)
def _sub(self: str, other: str, alpha: str) -> str:
    return f"{self} - {_times(alpha, other)}"


@_pointwise(_aten.rsub.Scalar, _aten.rsub.Tensor)
def _rsub(self: str, other: str, alpha: str) -> str:
    return f"{other} - {_times(alpha, self)}"


def _times(factor: str, value: str) -> str:
    return value if _number_in(factor) == 1 else f"{factor} * {value}"


def _number_in(text: str) -> float:
    """Return the number of a text of `write_number`; NaN if the text is no literal, as for infinities and -0.0."""
    try:
        return float(text)
    except ValueError:
        return math.nan


@_pointwise(_aten.logical_not.default, _aten.bitwise_not.default)
def _not(self: str) -> str:
    return f"{self} == 0"


@_pointwise(_aten.pow.Tensor_Scalar, is_costly=False)
def _pow(self: str, exponent: str) -> str | None:
    forms = {
        2.0: f"{self} * {self}",
        3.0: f"{self} * {self} * {self}",
        1.0: self,
        0.5: f"tl.sqrt({self})",
        -0.5: f"tl.rsqrt({self})",
        -1.0: f"1.0 / {self}",
    }
    return forms.get(_number_in(exponent))


@_pointwise(_aten.where.self, _aten.where.ScalarSelf, _aten.where.ScalarOther)
def _where(condition: str, self: str, other: str) -> str:
    return f"tl.where({condition}, {self}, {other})"


@_pointwise(_aten.masked_fill.Scalar, _aten.masked_fill.Tensor)
def _masked_fill(self: str, mask: str, value: str) -> str:
    return f"tl.where({mask}, {value}, {self})"


@_pointwise(_aten.clamp.default)
def _clamp(self: str, min: str | None, max: str | None) -> str:
    low = self if min is None else f"tl.where({self} < {min}, {min}, {self})"
    return low if max is None else f"tl.where({low} > {max}, {max}, {low})"


@_pointwise(_aten.clamp_min.default)
def _clamp_min(self: str, min: str) -> str:
    return _clamp(self, min, None)


@_pointwise(_aten.gelu.default, is_costly=True)
def _gelu(self: str, approximate: str) -> str:
    return f'activate({self}, "{_GELU[approximate]}")'


@_pointwise(_aten.gelu_backward.default, is_costly=True)
def _gelu_backward(grad_output: str, self: str, approximate: str) -> str:
    return f'{grad_output} * slope({self}, "{_GELU[approximate]}")'


_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


@_pointwise(_aten.silu_backward.default, is_costly=True)
def _silu_backward(grad_output: str, self: str) -> str:
    return f'{grad_output} * slope({self}, "silu")'


@_pointwise(_aten.sigmoid_backward.default)
def _sigmoid_backward(grad_output: str, output: str) -> str:
    return f"{grad_output} * {output} * (1.0 - {output})"


@_pointwise(_aten.tanh_backward.default)
def _tanh_backward(grad_output: str, output: str) -> str:
    return f"{grad_output} * (1.0 - {output} * {output})"


@_pointwise(_aten.threshold_backward.default)
def _threshold_backward(grad_output: str, self: str, threshold: str) -> str:
    return f"tl.where({self} <= {threshold}, 0.0, {grad_output})"


@_pointwise(_aten.clone.default, _aten._to_copy.default, _aten.contiguous.default)
def _copy(self: str, **options: object) -> str:
    return self


_COPIES = frozenset({_aten.clone.default, _aten._to_copy.default, _aten.contiguous.default})
_LOGICAL = frozenset({_aten.logical_and.default, _aten.logical_or.default, _aten.logical_xor.default})
_BOOLEAN = _LOGICAL | {
    *(_aten.logical_not.default, _aten.bitwise_not.default, _aten.where.self, _aten.masked_fill.Scalar),
    *(_aten.bitwise_and.Tensor, _aten.bitwise_or.Tensor, _aten.bitwise_xor.Tensor),
}
"""Operators that a kernel may compute with a boolean result. Comparisons and copies may be boolean too."""

# Reductions map the tile's values, filled with the identity where the tile has no element, to one value per row.
REDUCTIONS: Mapping[OpOverload, tuple[str, str]] = MappingProxyType(
    {
        _aten.sum.default: ("0", "tl.sum({x}, axis=1, keep_dims=True)"),
        _aten.sum.dim_IntList: ("0", "tl.sum({x}, axis=1, keep_dims=True)"),
        _aten.mean.default: ("0.0", "tl.sum({x}, axis=1, keep_dims=True) / {count}"),
        _aten.mean.dim: ("0.0", "tl.sum({x}, axis=1, keep_dims=True) / {count}"),
        _aten.amax.default: ('-float("inf")', "largest({x})"),
        _aten.amin.default: ('float("inf")', "smallest({x})"),
    }
)
"""From a reduction to its identity element and the template of its Triton expression.

In a template, {x} is the operand's expression. {count} is the number of elements that are reduced to one.
"""

VIEWS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.squeeze.default,
        _aten.expand.default,
        _aten.permute.default,
        _aten.transpose.int,
        _aten.t.default,
    }
)
"""Operators that a kernel computes by other indices into the same elements."""

CONSTANTS = frozenset({_aten.full.default, _aten.scalar_tensor.default, _aten.zeros.default, _aten.ones.default})
"""Operators that make a tensor filled with one number."""


def kind_of(target: Any) -> IndexKind | None:
    """Return how an operator relates indices of operands and result, or None if generated kernels cannot compute it."""
    for kind, table in (
        (IndexKind.POINTWISE, POINTWISE),
        (IndexKind.REDUCTION, REDUCTIONS),
        (IndexKind.VIEW, VIEWS),
        (IndexKind.CONSTANT, CONSTANTS),
    ):
        if target in table:
            return kind
    return None


def bound_arguments(step: GroupStep) -> dict[str, Any]:
    """Return the arguments of a step's call by name, with the operator's defaults for arguments that are not given."""
    parameters = step.target._schema.arguments
    bound = {parameter.name: parameter.default_value for parameter in parameters}
    bound.update(zip((parameter.name for parameter in parameters), step.args, strict=False))
    return bound | dict(step.kwargs)


def reduced_dims(step: GroupStep, operand: ValueShape) -> tuple[int, ...]:
    """Return the dims of `operand` that the reduction `step` reduces, ascending."""
    dims = bound_arguments(step).get("dim")
    every = range(len(operand.shape))
    if dims is None or list(dims) == []:
        return tuple(every)
    return tuple(sorted(dim % len(operand.shape) for dim in dims))


def number_of(step: GroupStep) -> float | int | bool:
    """Return the number that fills the tensor of `step`, a call of an operator in `CONSTANTS`."""
    if step.target is _aten.zeros.default:
        return 0
    if step.target is _aten.ones.default:
        return 1
    bound = bound_arguments(step)
    return bound["fill_value"] if "fill_value" in bound else bound["s"]


def write_number(number: float | int | bool, triton_type: str) -> str:
    """Return a number as Triton source text, for a Triton type such as "tl.float32"."""
    if triton_type == "tl.float32":
        number = float(number)
        if number == 0 and math.copysign(1.0, number) < 0:
            return "(-1.0 * tl.full([], 0.0, tl.float32))"  # Triton 3.6 drops the sign of a literal -0.0
        if math.isfinite(number):
            return repr(number)
        return 'float("nan")' if math.isnan(number) else f'{"-" if number < 0 else ""}float("inf")'
    return repr(bool(number) if triton_type == "tl.int1" else int(number))


def convert(text: str, before: str, after: str) -> str:
    """Return the Triton expression `text` converted from Triton type `before` to Triton type `after`."""
    if before == after:
        return text
    return f"({text} != 0)" if after == "tl.int1" else f"{text}.to({after})"


def write_pointwise(step: GroupStep, values: tuple[ValueShape, ...], texts: Mapping[int, str]) -> str | None:
    """Return the Triton expression of a pointwise step's result, or None if its arguments have no expression.

    `values` has shape, strides and dtype of each value of the group. `texts` maps the number of an operand to its
    expression.
    """
    entry = POINTWISE[step.target]
    if not _has_plain_arguments(step, values):
        return None
    triton_type = TRITON_TYPES[_computed_in(step, values, entry)]
    arguments: dict[str, Any] = {}
    for name, item in bound_arguments(step).items():
        own = "tl.int1" if name in ("condition", "mask") else triton_type
        if isinstance(item, Ref):
            arguments[name] = convert(texts[item.index], TRITON_TYPES[values[item.index].dtype], own)
        elif isinstance(item, (int, float)) and not isinstance(item, bool):
            if triton_type != "tl.float32" and isinstance(item, float):
                return None
            arguments[name] = write_number(item, own)
        else:
            arguments[name] = item
    written = entry.write(**arguments)
    if written is None:
        return None
    rounded = _STORED.get(step.value.dtype) if step.target is _aten._to_copy.default else None
    source = values[step.operands[0]].dtype if step.operands else None
    if rounded is not None and source != step.value.dtype:
        return f"{written}.to({rounded}).to(tl.float32)"
    return written


def _has_plain_arguments(step: GroupStep, values: tuple[ValueShape, ...]) -> bool:
    """Whether the expression in `POINTWISE` is right for the dtypes of a call's operands and result."""
    kinds = [values[index].dtype for index in step.operands] + [step.value.dtype]
    if not step.operands or any(dtype not in TRITON_TYPES for dtype in kinds):
        return False
    if step.target in _COPIES:
        return step.value.dtype.is_floating_point or not kinds[0].is_floating_point
    entry = POINTWISE[step.target]
    if step.value.dtype is torch.bool:
        return entry.compares or step.target in _BOOLEAN
    if step.target in _LOGICAL or step.target is _aten.bitwise_not.default:
        return False
    needs_float = entry.is_costly or step.target in (_aten.reciprocal.default, _aten.relu.default, _aten.abs.default)
    return not needs_float or step.value.dtype.is_floating_point


def _computed_in(step: GroupStep, values: tuple[ValueShape, ...], entry: Pointwise) -> torch.dtype:
    """Return the dtype in which a pointwise step is computed.

    It is ATen's promoted dtype of the operands for comparisons, bool for logical operators, and else the result's
    dtype.
    """
    if step.target in _LOGICAL or step.target is _aten.logical_not.default:
        return torch.bool
    if step.target in _COPIES:
        return step.value.dtype
    if not entry.compares:
        return step.value.dtype

    def sample(item: Any) -> Any:
        value = values[item.index] if isinstance(item, Ref) else None
        return item if value is None else torch.empty([1] * len(value.shape), dtype=value.dtype)

    return torch.result_type(*map(sample, step.args))


def write_reduction(step: GroupStep, operand: ValueShape, text: str, mask: str) -> str | None:
    """Return the Triton expression of a reduction over the columns of a tile, or None if the dtypes have none.

    `text` is the operand's expression. The identity element stands where the expression `mask` is false.
    """
    source, target = operand.dtype, step.value.dtype
    if source not in TRITON_TYPES or target not in TRITON_TYPES:
        return None
    triton_type = TRITON_TYPES[target]
    identity, template = REDUCTIONS[step.target]
    if triton_type == "tl.int1" or (
        triton_type != "tl.float32" and step.target not in (_aten.sum.default, _aten.sum.dim_IntList)
    ):
        return None
    if not source.is_floating_point and target.is_floating_point:
        return None
    count = math.prod(operand.shape[dim] for dim in reduced_dims(step, operand))
    filled = (
        f"tl.where({mask}, {convert(text, TRITON_TYPES[source], triton_type)}, {write_identity(identity, triton_type)})"
    )
    return template.format(x=filled, count=float(count))


def write_identity(identity: str, triton_type: str) -> str:
    """Return an identity element of `REDUCTIONS` as Triton source text, for a Triton type such as "tl.float32"."""
    return identity if triton_type != "tl.float32" or "float" in identity else "0.0"
