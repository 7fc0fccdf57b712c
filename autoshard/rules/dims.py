"""Helpers with which rule functions build the `Dims` of operands and results.

A rule for tensors with any number of dims cannot be one fixed string. Such a rule names the factors of its main tensor
`d0, d1, ...`, and derives the dims of other tensors from these names.
"""

from __future__ import annotations

import cmath
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from typing import Any

import torch

from autoshard.rules.carries import increasing, meaningful, moving
from autoshard.rules.notation import Dims, Rule

ONE: tuple[str, ...] = ()
"""A dim of size one without a factor."""

BLOCKED: tuple[str, ...] = ("_",)
"""A dim that cannot be split."""


def named(ndim: int, prefix: str = "d") -> Dims:
    """Return `ndim` dims with one factor each, named `d0, d1, ...` for the prefix "d"."""
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
    """Return the dims of an operand of `shape` that broadcasts to a tensor with `dims`.

    The operand's dims are aligned at the right. A dim of size one has no factor.
    """
    aligned = dims[len(dims) - len(shape) :]
    return tuple(ONE if size == 1 else dim for size, dim in zip(shape, aligned, strict=True))


def elementwise(shapes: Sequence[Sequence[int]], results: int = 1) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Return the dims of operands and results of an operator that broadcasts operands and acts on each element.

    Args:
        shapes: the operands' shapes.
        results: the number of results.
    """
    if len(shapes) == 1:
        dims = named(len(shapes[0]))
        return (dims,), (dims,) * results
    dims = named(len(broadcast_shape(shapes)))
    return tuple(broadcast_dims(shape, dims) for shape in shapes), (dims,) * results


def without(dims: Dims, removed: Collection[int], *, keepdim: bool = False) -> Dims:
    """Return `dims` without the dims at the positions `removed`. With `keepdim`, dims of size one replace them."""
    if keepdim:
        return tuple(ONE if position in removed else dim for position, dim in enumerate(dims))
    return tuple(dim for position, dim in enumerate(dims) if position not in removed)


def with_blocked(dims: Dims, positions: Collection[int]) -> Dims:
    """Return a copy of `dims` in which the dims at `positions` cannot be split."""
    return tuple(BLOCKED if position in positions else dim for position, dim in enumerate(dims))


def normal_dim(dim: int, ndim: int) -> int:
    """Return `dim` as an index from 0, for a tensor with `ndim` dims. A negative `dim` counts from the end."""
    return dim + ndim if dim < 0 else dim


def normal_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return `dims` as indices from 0, for a tensor with `ndim` dims. None and the empty list stand for all dims."""
    if dims is None:
        return tuple(range(ndim))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return tuple(normal_dim(dim, ndim) for dim in listed) or tuple(range(ndim))


def names(dims: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return all factors of `dims`, in order."""
    return tuple(factor for dim in dims for factor in dim)


def is_additive(*tensors: torch.Tensor) -> bool:
    """Whether these tensors may be partial sums. Booleans may not."""
    return all(tensor.dtype != torch.bool for tensor in tensors)


def are_finite(*numbers: Any) -> bool:
    """Whether all numbers among a call's arguments are finite."""
    return all(cmath.isfinite(number) for number in numbers)


def tensors(*values: object) -> list[torch.Tensor]:
    """Return the tensors among `values`, without other objects such as None for an absent tensor."""
    return [value for value in values if isinstance(value, torch.Tensor)]


def moves(source: Dims, result: Dims, **options: object) -> Rule:
    """Return the rule of an operator that only moves the elements of its one operand.

    Args:
        source: the dims of the operand.
        result: the dims of the result.
        options: further fields of `Rule`.
    """
    return Rule(((source,), (result,)), transparent=True, **options)  # type: ignore[arg-type]


def joins(operands: Sequence[Dims], result: Dims, xs: Sequence[torch.Tensor]) -> Rule:
    """Return the rule of an operator that joins its operands. A result element is an element of an operand, or zero.

    Partial maxima and minima pass through any subset of the operands. With more than six operands, they pass through
    one operand or through all operands.

    Args:
        operands: the dims of each operand.
        result: the dims of the result.
        xs: the operands.
    """
    together = tuple(range(len(xs)))
    largest = len(xs) - 1 if len(xs) <= 6 else 1
    some = [group for count in range(1, largest + 1) for group in combinations(together, count)]
    carries = meaningful(xs, [*moving(together), *increasing(*some)])
    return Rule((tuple(operands), (result,)), linear=[together] if is_additive(*xs) else (), carries=carries)
