"""Names for the dims of operands, from which rule functions build their notation.

A rule for tensors of any rank cannot be one fixed string. It names the dims of its main tensor `d0, d1, ...` and
derives the dims of other tensors from these names.
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
"""A dim that may not be split."""


def named(ndim: int, prefix: str = "d") -> Dims:
    """One factor for each of `ndim` dims: `d0, d1, ...`."""
    return tuple((f"{prefix}{dim}",) for dim in range(ndim))


def all_blocked(ndim: int) -> Dims:
    """`ndim` dims that cannot be split."""
    return (BLOCKED,) * ndim


def broadcast_shape(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The shape to which `shapes` broadcast."""
    result: list[int] = []
    for shape in shapes:
        result = [1] * (len(shape) - len(result)) + result
        for position, size in enumerate(reversed(shape), start=1):
            if size != 1:
                result[-position] = size
    return tuple(result)


def broadcast_dims(shape: Sequence[int], dims: Dims) -> Dims:
    """The dims of an operand of `shape` that broadcasts to a tensor with `dims`: right aligned, no factor for size
    one.
    """
    aligned = dims[len(dims) - len(shape) :]
    return tuple(ONE if size == 1 else dim for size, dim in zip(shape, aligned, strict=True))


def elementwise(shapes: Sequence[Sequence[int]], results: int = 1) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """The notation of an operator that broadcasts operands of `shapes` and acts on each element."""
    if len(shapes) == 1:
        dims = named(len(shapes[0]))
        return (dims,), (dims,) * results
    dims = named(len(broadcast_shape(shapes)))
    return tuple(broadcast_dims(shape, dims) for shape in shapes), (dims,) * results


def without(dims: Dims, removed: Collection[int], *, keepdim: bool = False) -> Dims:
    """`dims` without the positions `removed`, or with dims of size one there."""
    if keepdim:
        return tuple(ONE if position in removed else dim for position, dim in enumerate(dims))
    return tuple(dim for position, dim in enumerate(dims) if position not in removed)


def with_blocked(dims: Dims, positions: Collection[int]) -> Dims:
    """`dims` with blocked dims at `positions`."""
    return tuple(BLOCKED if position in positions else dim for position, dim in enumerate(dims))


def normal_dim(dim: int, ndim: int) -> int:
    """`dim` counted from the front."""
    return dim + ndim if dim < 0 else dim


def normal_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """`dims` counted from the front. None and the empty list mean all dims."""
    if dims is None:
        return tuple(range(ndim))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return tuple(normal_dim(dim, ndim) for dim in listed) or tuple(range(ndim))


def names(dims: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The factors of `dims`, in order."""
    return tuple(factor for dim in dims for factor in dim)


def is_additive(*tensors: torch.Tensor) -> bool:
    """Whether these tensors may be partial sums. All types but booleans may."""
    return all(tensor.dtype != torch.bool for tensor in tensors)


def are_finite(*numbers: Any) -> bool:
    """Whether all numbers among a call's arguments are finite."""
    return all(cmath.isfinite(number) for number in numbers)


def tensors(*values: object) -> list[torch.Tensor]:
    """The tensors among `values`; absent optional tensors are left out."""
    return [value for value in values if isinstance(value, torch.Tensor)]


def moves(source: Dims, result: Dims, **options: object) -> Rule:
    """The rule of an operator that moves elements of one operand."""
    return Rule(((source,), (result,)), transparent=True, **options)  # type: ignore[arg-type]


def joins(operands: Sequence[Dims], result: Dims, xs: Sequence[torch.Tensor]) -> Rule:
    """The rule of an operator whose every result element is an element of some operand, or zero.

    Maxima and minima pass through any subset of the operands; of more than six operands, through one or through all.
    """
    together = tuple(range(len(xs)))
    largest = len(xs) - 1 if len(xs) <= 6 else 1
    some = [group for count in range(1, largest + 1) for group in combinations(together, count)]
    carries = meaningful(xs, [*moving(together), *increasing(*some)])
    return Rule((tuple(operands), (result,)), linear=[together] if is_additive(*xs) else (), carries=carries)
