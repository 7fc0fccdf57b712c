"""Decides which factors of a call may be split unevenly, and with which values padding is filled.

If the size of a factor is not a multiple of the number of pieces, ranks hold padded pieces. Padding has arbitrary
values, such as NaN or an invalid index. An uneven split is right in three cases.

* All results have the factor. Then padding of operands only reaches padding of results. Padding of indices is filled
  with 0, so that they are valid.
* The factor is summed over, and the results are linear in operands that all have the factor. Then padding is filled
  with 0.
* The rule states fill values itself (`Rule.padding`), as other reductions do, and rewrites that communicate.

In all cases the factor must be alone in its dims, because no spec expresses padding inside a dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard.ir.reduction import identity_of
from autoshard.ir.spec import Reduction
from autoshard.rules.notation import BoundRule, Fill, Rule

aten = torch.ops.aten

_INTEGER_DIVISIONS = frozenset(
    {
        aten.div.Tensor_mode,
        aten.floor_divide.default,
        aten.fmod.Tensor,
        aten.remainder.Tensor,
        aten.remainder.Scalar_Tensor,
    }
)


def padding_of(
    operator: Any, rule: Rule, bound: BoundRule, dtypes: Sequence[torch.dtype]
) -> Mapping[str, tuple[Fill, ...]]:
    """Return, for each factor that may be split unevenly, the value that fills padding of each operand.

    None stands for padding that is not filled.
    """
    if rule.local is not None and rule.padding is None:
        return {}
    even = set(rule.even)
    found: dict[str, tuple[Fill, ...]] = {}
    for factor in dict.fromkeys((*bound.splittable, *(factor for group in bound.together for factor in group))):
        if "*" in even or factor in even or not _stands_alone(bound, factor):
            continue
        stated = factor in (rule.padding or {})
        if stated or _is_parallel(bound, factor):
            fill = (rule.padding or {}).get(factor)
        elif _is_linear_sum(bound, factor):
            fill = 0
        else:
            continue
        found[factor] = tuple(
            _fill(operator, bound, index, dtype, fill) if _has(bound, index, factor) else None
            for index, dtype in enumerate(dtypes)
        )
    return found


def _fill(operator: Any, bound: BoundRule, operand: int, dtype: torch.dtype, fill: Fill) -> Fill:
    if isinstance(fill, Reduction):
        return identity_of(fill, dtype)
    if fill is not None or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return fill
    if operator in _INTEGER_DIVISIONS:
        return 1
    is_moved = bound.transparent and operand == 0
    is_index = torch.Tag.pointwise not in getattr(operator, "tags", ()) and not is_moved
    return 0 if is_index else None


def _stands_alone(bound: BoundRule, factor: str) -> bool:
    return all(len(dim) == 1 for dims in (*bound.inputs, *bound.outputs) for dim in dims if factor in dim)


def _is_parallel(bound: BoundRule, factor: str) -> bool:
    return factor not in bound.exchanged and all(any(factor in dim for dim in dims) for dims in bound.outputs)


def _is_linear_sum(bound: BoundRule, factor: str) -> bool:
    """Whether zero padding adds zero: results are sums over `factor`, linear in operands that all have the factor."""
    if bound.reduce.get(factor) is not Reduction.SUM or factor in bound.whole:
        return False
    groups = [group - bound.added for group in bound.linear]
    return any(group and all(_has(bound, operand, factor) for operand in group) for group in groups)


def _has(bound: BoundRule, operand: int, factor: str) -> bool:
    return any(factor in dim for dim in bound.inputs[operand])
