"""Reductions: their identities, and the combination of addends.

The identity of a sum of floating-point numbers is -0.0: `x + -0.0` is `x` bit for bit, also for `x = -0.0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from autoshard.ir.spec import Reduction

_OPERATORS = {
    Reduction.SUM: torch.add,
    Reduction.MAX: torch.maximum,
    Reduction.MIN: torch.minimum,
    Reduction.PRODUCT: torch.mul,
}


REDUCIBLE = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)
"""The dtypes of tensors that process groups can send and reduce."""


def identity_of(reduction: Reduction, dtype: torch.dtype) -> bool | int | float:
    """Return the element of `dtype` that leaves any other element unchanged in a reduction.

    Example:
        >>> identity_of(Reduction.MAX, torch.float32), identity_of(Reduction.MIN, torch.int8)
        (-inf, 127)
    """
    if dtype is torch.bool:
        return reduction in (Reduction.PRODUCT, Reduction.MIN)
    if reduction is Reduction.PRODUCT:
        return 1
    if not dtype.is_floating_point and not dtype.is_complex:
        return _integer_identity(reduction, dtype)
    limit = torch.finfo(dtype).max if dtype in _WITHOUT_INFINITY else float("inf")
    return {Reduction.SUM: -0.0, Reduction.MAX: -limit, Reduction.MIN: limit}[reduction]


_WITHOUT_INFINITY = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def _integer_identity(reduction: Reduction, dtype: torch.dtype) -> int:
    limits = torch.iinfo(dtype)
    return {Reduction.SUM: 0, Reduction.MAX: limits.min, Reduction.MIN: limits.max}[reduction]


def combine(reduction: Reduction, addends: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce `addends` of equal shapes in order. For bool, a sum is `or` and a product is `and`.

    Sums and products of float16 and bfloat16 are computed in float32 and rounded once.
    """
    operator, dtype = _OPERATORS[reduction], addends[0].dtype
    is_narrow = dtype.is_floating_point and dtype.itemsize < 4 and reduction in (Reduction.SUM, Reduction.PRODUCT)
    if not is_narrow or len(addends) == 1:
        return reduce(operator, addends)
    return reduce(operator, (addend.to(torch.float32) for addend in addends)).to(dtype)
