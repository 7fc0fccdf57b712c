"""Rules of operators that make tensors, such as `zeros` and `arange`.

Every dim may be split. The rewrite calls the operator with the local shape. A tensor of zeros is also a partial sum of
zeros (`linear=[()]`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoshard.rules.dims import all_blocked, elementwise, named
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Rewrite, Rule
from autoshard.rules.registry import sharding_rule

aten = torch.ops.aten

_ZERO = ((),)


@sharding_rule(aten.full.default, aten.ones.default, aten.empty.memory_format)
def full(size: Sequence[int], value: float = 1, **kwargs: Any) -> Rule:
    return Rule(((), (named(len(size)),)), linear=_ZERO if value == 0 else (), local=_local_filled, padding={})


@sharding_rule(aten.zeros.default)
def zeros(size: Sequence[int], **kwargs: Any) -> Rule:
    return full(size, 0)


def _local_filled(context: LocalContext, size: Sequence[int], *rest: Any, **kwargs: Any) -> Any:
    return context.default(context.output_shape(), *rest, **kwargs)


@sharding_rule(aten.scalar_tensor.default)
def scalar_tensor(value: float, **kwargs: Any) -> Rule:
    return Rule("-> scalar", linear=_ZERO if value == 0 else ())


@sharding_rule(aten.new_full.default, aten.new_ones.default, aten.new_empty.default)
def new_full(x: torch.Tensor, size: Sequence[int], value: float = 1, **kwargs: Any) -> Rule:
    return _new(x, size, is_zero=value == 0)


@sharding_rule(aten.new_zeros.default)
def new_zeros(x: torch.Tensor, size: Sequence[int], **kwargs: Any) -> Rule:
    return _new(x, size, is_zero=True)


def _local_new(context: LocalContext, x: Any, size: Sequence[int], *rest: Any, **kwargs: Any) -> Any:
    return context.default(x, context.output_shape(), *rest, **kwargs)


def _new(x: torch.Tensor, size: Sequence[int], *, is_zero: bool = False, local: Rewrite = _local_new) -> Rule:
    """Return the rule of an operator that makes a tensor of shape `size` with dtype and device of `x`.

    With `is_zero`, the tensor is zero, so it is also a partial sum of zeros. `local` is the rewrite.
    """
    result = named(len(size))
    source = result if tuple(x.shape) == tuple(size) else all_blocked(x.dim())
    return Rule(((source,), (result,)), linear=_ZERO if is_zero else (), local=local, padding={})


@sharding_rule(aten.new_empty_strided.default)
def new_empty_strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], **kwargs: Any) -> Rule:
    """Return a rule that ignores `stride`: each rank makes a contiguous, uninitialised piece."""
    return _new(x, size, local=_local_new_empty)


def _local_new_empty(context: LocalContext, x: Any, *_: Any, **kwargs: Any) -> Any:
    return context.call(aten.new_empty.default, x, context.output_shape(), **kwargs)


@sharding_rule(aten.full_like.default, aten.ones_like.default, aten.empty_like.default)
def full_like(x: torch.Tensor, value: float = 1, **kwargs: Any) -> Rule:
    return Rule(elementwise([x.shape]), linear=((), (0,)) if value == 0 else ())


@sharding_rule(aten.zeros_like.default)
def zeros_like(x: torch.Tensor, **kwargs: Any) -> Rule:
    return full_like(x, 0)


@sharding_rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(start: float, end: float | None = None, step: float = 1, **kwargs: Any) -> Rule | None:
    """Return the rule of `arange`, or None for floats, because their rounding depends on the distance from `start`."""
    start, end = (0, start) if end is None else (start, end)
    if not all(isinstance(value, int) for value in (start, end, step)):
        return None

    def local(context: LocalContext, *args: Any, **kwargs: Any) -> Any:
        first = context.offset("n") * step + start
        last = first + context.local_size("n") * step
        return context.call(aten.arange.start_step, first, last, step, **kwargs)

    return Rule("-> n", local=local, padding={})
