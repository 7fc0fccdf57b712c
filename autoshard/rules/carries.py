"""Makes the entries of `Rule.carries`: ways for partial maxima, minima, products and some sums to pass a call.

A partial operand *passes* a call if the call turns each rank's addend into an addend of the result. A partial maximum
passes an operator that never decreases. In an operator that never increases, the maximum becomes a partial minimum. One
of several operands may be a partial maximum or minimum, while the other operands are whole. For operators such as `max`
and `where`, all operands may be partial together. A partial product passes products and powers. Sums through linear
operands are in `Rule.linear` instead.

Each *group* below is a collection of operand indices that are partial at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from autoshard.ir.spec import Reduction
from autoshard.rules.notation import Carry

Operands = Collection[int]

_OPPOSITE = {Reduction.MAX: Reduction.MIN, Reduction.MIN: Reduction.MAX}


def increasing(*groups: Operands) -> list[Carry]:
    """Return carries of maxima and minima through each group of operands.

    The carries are valid if no result of the call decreases when operands of the group increase.
    """
    return [Carry(frozenset(group), reduction) for group in groups for reduction in _OPPOSITE]


def decreasing(*groups: Operands) -> list[Carry]:
    """Return carries through each group of operands, in which maxima become minima and minima become maxima.

    The carries are valid for a call with one result that never increases when operands of the group increase.
    """
    return [Carry(frozenset(group), given, (left,)) for group in groups for given, left in _OPPOSITE.items()]


def scaled(scale: Any, operand: int) -> list[Carry]:
    """Return carries of maxima and minima through operand number `operand`, which the call multiplies by `scale`.

    There are no carries if `scale` is complex, zero or infinite.
    """
    if isinstance(scale, complex) or scale == 0 or math.isinf(scale):
        return []
    return increasing((operand,)) if scale > 0 else decreasing((operand,))


def increasing_addend(*addends: torch.Tensor, operand: int) -> list[Carry]:
    """Return carries of maxima and minima through operand number `operand`, one of the tensors that the call adds.

    The list is empty if some of `addends` has integers or complex numbers. A rank without elements has the smallest
    integer as its maximum, and adding a negative number would wrap round.
    """
    keeps_order = all(x.is_floating_point() or x.dtype == torch.bool for x in addends)
    return increasing((operand,)) if keeps_order else []


def maxima(*groups: Operands) -> list[Carry]:
    """Return a carry of maxima through each group of operands."""
    return [Carry(frozenset(group), Reduction.MAX) for group in groups]


def minima(*groups: Operands) -> list[Carry]:
    """Return a carry of minima through each group of operands."""
    return [Carry(frozenset(group), Reduction.MIN) for group in groups]


def products(*groups: Operands) -> list[Carry]:
    """Return a carry of products through each group of operands."""
    return [Carry(frozenset(group), Reduction.PRODUCT) for group in groups]


def moving(*groups: Operands) -> list[Carry]:
    """Return carries of maxima, minima and products through each group of operands whose elements are moved."""
    return [*increasing(*groups), *products(*groups)]


def meaningful(operands: Sequence[torch.Tensor] | Mapping[int, torch.Tensor], carries: Iterable[Carry]) -> list[Carry]:
    """Return the `carries` that are possible for the dtypes of `operands`. A mapping has operands by index.

    Products through booleans, and carries through operands outside the mapping, are left out. The registry later
    removes all carries of complex numbers except sums.
    """
    known = operands if isinstance(operands, Mapping) else dict(enumerate(operands))
    return [carry for carry in carries if all(_can_await(known.get(i), carry.reduction) for i in carry.operands)]


def _can_await(operand: torch.Tensor | None, reduction: Reduction) -> bool:
    if operand is None:
        return False
    return operand.dtype != torch.bool or reduction is not Reduction.PRODUCT


def keeps_sums(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether addends that are converted from dtype `source` to `target` add up to the converted sum.

    The sums differ if conversion rounds to integers or booleans, or if narrow integer addends may have wrapped round.
    """
    if source == target:
        return True
    is_number = target.is_floating_point or target.is_complex
    return is_number and (source.is_floating_point or source.is_complex or source is torch.int64)


def through_conversion(source: torch.dtype, target: torch.dtype, operand: int) -> list[Carry]:
    """Return carries of maxima, minima and products through operand number `operand`, which the call converts.

    Conversion keeps the order, except to booleans, and to integers that may wrap round. Conversion keeps products where
    it keeps sums, except from complex numbers to real numbers.
    """
    carries: list[Carry] = []
    if not source.is_complex and _keeps_order(source, target):
        carries += increasing((operand,))
    if keeps_sums(source, target) and source.is_complex <= target.is_complex:
        carries += products((operand,))
    return carries


def _keeps_order(source: torch.dtype, target: torch.dtype) -> bool:
    return source == target or not (target == torch.bool or target.is_complex or _wraps(source, target))


def _wraps(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether numbers of dtype `source` may exceed the range of the integer dtype `target`, and lose their order."""
    if target.is_floating_point or source in (torch.bool, target):
        return False
    return source.is_floating_point or not target.is_signed or source.itemsize >= target.itemsize


def only_in(result: int, results: int, carries: Iterable[Carry]) -> list[Carry]:
    """Return carries of a call with `results` results, in which only result number `result` is partial.

    `carries` are those of a call that returns only this result.
    """
    return [
        Carry(carry.operands, carry.reduction, tuple(carry.result(0) if i == result else None for i in range(results)))
        for carry in carries
    ]


def sums(*groups: Operands) -> list[Carry]:
    """Return a carry for each group: if all operands of the group are partial sums, all results are partial sums.

    `only_in` restricts the carries to one result. If all results are linear in a group, use `Rule.linear` instead.
    """
    return [Carry(frozenset(group), Reduction.SUM) for group in groups]


@dataclass(frozen=True, slots=True)
class LinearResult:
    """One result of a call with several results.

    Args:
        operands: indices of the operands on which the result depends.
        linear: sets of operand indices. The result is jointly linear in the operands of each set.
    """

    operands: frozenset[int]
    linear: tuple[frozenset[int], ...]


def linear_result(operands: Operands, *linear: Operands) -> LinearResult:
    """Return a `LinearResult` that depends on `operands` and is jointly linear in each non-empty set of `linear`."""
    return LinearResult(frozenset(operands), tuple(frozenset(group) for group in linear if group))


def sums_by_result(results: Sequence[LinearResult]) -> list[Carry]:
    """Return carries of sums through sets of operands, for a call with several results.

    A result is whole if it depends on no operand of the set. Every other result is partial, and must be jointly linear
    in the operands of the set on which it depends.
    """
    sets = list(dict.fromkeys(group for result in results for group in result.linear))
    unions = dict.fromkeys(frozenset().union(*chosen) for chosen in _subsets(sets))
    found = (_sum_through(operands, results) for operands in unions if operands)
    return [carry for carry in found if carry is not None]


def _subsets(sets: Sequence[frozenset[int]]) -> Iterable[tuple[frozenset[int], ...]]:
    return (chosen for count in range(1, len(sets) + 1) for chosen in combinations(sets, count))


def _sum_through(operands: frozenset[int], results: Sequence[LinearResult]) -> Carry | None:
    awaited: list[Reduction | None] = []
    for result in results:
        touched = operands & result.operands
        if touched and touched not in result.linear:
            return None
        awaited.append(Reduction.SUM if touched else None)
    return Carry(operands, Reduction.SUM, tuple(awaited))
