"""Helpers with which rule functions build the `Dims` of operands and results.

A rule for tensors with any number of dims names the factors of its main tensor `d0, d1, ...`. The dims of other tensors
follow from these names.
"""

from __future__ import annotations

import cmath
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from autoshard.rules.notation import Dims, Rule

ONE: tuple[str, ...] = ()
"""A dim of size one without a factor."""

BLOCKED: tuple[str, ...] = ("_",)
"""A dim that cannot be split."""


def named(ndim: int, prefix: str = "d") -> Dims:
    """Return `ndim` dims with one factor each, named `d0, d1, ...` if `prefix` is "d"."""
    return tuple((f"{prefix}{dim}",) for dim in range(ndim))


def all_blocked(ndim: int) -> Dims:
    """Return `ndim` dims that cannot be split."""
    return (BLOCKED,) * ndim


def broadcast_shape(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the shape to which tensors of these shapes broadcast."""
    result: list[int] = []
    for shape in shapes:
        result = [1] * (len(shape) - len(result)) + result
        for position, size in enumerate(reversed(shape), start=1):
            if size != 1:
                result[-position] = size
    return tuple(result)


def broadcast_dims(shape: Sequence[int], dims: Dims) -> Dims:
    """Return the dims of an operand of `shape` that broadcasts to `dims`; a dim of size one has no factor."""
    aligned = dims[len(dims) - len(shape) :]
    return tuple(ONE if size == 1 else dim for size, dim in zip(shape, aligned, strict=True))


def elementwise(shapes: Sequence[Sequence[int]], results: int = 1) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Return the dims of the operands, and of `results` results, of an operator that broadcasts its operands.

    `shapes` has the shapes of the operands.
    """
    if len(shapes) == 1:
        dims = named(len(shapes[0]))
        return (dims,), (dims,) * results
    dims = named(len(broadcast_shape(shapes)))
    return tuple(broadcast_dims(shape, dims) for shape in shapes), (dims,) * results


def without(dims: Dims, removed: Collection[int], *, keepdim: bool = False) -> Dims:
    """Return `dims` less the dims at the positions `removed`. With `keepdim`, dims of size one stay in their places."""
    if keepdim:
        return tuple(ONE if position in removed else dim for position, dim in enumerate(dims))
    return tuple(dim for position, dim in enumerate(dims) if position not in removed)


def with_blocked(dims: Dims, positions: Collection[int]) -> Dims:
    """Return `dims` with a dim that cannot be split at each index in `positions`."""
    return tuple(BLOCKED if position in positions else dim for position, dim in enumerate(dims))


def normal_dim(dim: int, ndim: int) -> int:
    """Return `dim` as an index from 0, for a tensor with `ndim` dims. A negative `dim` counts from the end."""
    return dim + ndim if dim < 0 else dim


def normal_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return `dims` as indices from 0, for a tensor with `ndim` dims; all dims for None and for an empty list."""
    if dims is None:
        return tuple(range(ndim))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return tuple(normal_dim(dim, ndim) for dim in listed) or tuple(range(ndim))


def names(dims: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return all factors of `dims`, in order and with repetitions."""
    return tuple(factor for dim in dims for factor in dim)


def is_additive(x: torch.Tensor) -> bool:
    """Whether a tensor may be a partial sum: booleans may not."""
    return x.dtype != torch.bool


def keeps_sums(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether addends that are converted from dtype `source` to `target` add up to the converted sum.

    The sums differ if conversion rounds to integers or booleans, or if narrow integer addends may have wrapped round.
    """
    if source == target:
        return True
    is_number = target.is_floating_point or target.is_complex
    return is_number and (source.is_floating_point or source.is_complex or source is torch.int64)


def are_finite(*numbers: Any) -> bool:
    """Whether all of these Python numbers are finite."""
    return all(cmath.isfinite(number) for number in numbers)


def tensors(*values: object) -> list[torch.Tensor]:
    """Return the tensors among `values`, less other objects such as None for an absent tensor."""
    return [value for value in values if isinstance(value, torch.Tensor)]


def moves(source: Dims, result: Dims, **options: object) -> Rule:
    """Return the rule of an operator with one operand, whose elements it only moves to the result.

    `options` are further fields of the rule.
    """
    return Rule(((source,), (result,)), transparent=True, **options)  # type: ignore[arg-type]


def joins(operands: Sequence[Dims], result: Dims) -> Rule:
    """Return the rule of an operator whose result elements are each an element of an operand, or zero.

    Partial sums pass if all operands are partial together.
    """
    return Rule((tuple(operands), (result,)), linear=[tuple(range(len(operands)))])
