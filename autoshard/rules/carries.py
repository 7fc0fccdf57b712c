"""Ways for partial values to pass through a call, beside sums through linear operands.

A pending maximum passes through an operator that never decreases; through an operator that never increases it becomes a
minimum. It passes through each of several operands alone, and through all operands of a lattice polynomial (`max`,
`where`) together. A pending product passes through products and powers. Rules list these ways in `Rule.carries`.
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
    """Maxima and minima through each group of operands, in which results never decrease."""
    return [Carry(frozenset(group), reduction) for group in groups for reduction in _OPPOSITE]


def decreasing(*groups: Operands) -> list[Carry]:
    """Maxima through operands in which the only result never increases become minima, and minima become maxima."""
    return [Carry(frozenset(group), given, (left,)) for group in groups for given, left in _OPPOSITE.items()]


def scaled(scale: Any, operand: int) -> list[Carry]:
    """Maxima and minima through an operand that is multiplied by a number; infinity times 0 is no number."""
    if isinstance(scale, complex) or scale == 0 or math.isinf(scale):
        return []
    return increasing((operand,)) if scale > 0 else decreasing((operand,))


def increasing_addend(*addends: torch.Tensor, operand: int) -> list[Carry]:
    """Maxima and minima through one operand of a sum; `addends` are all operands of the sum.

    Integers do not qualify: a rank without elements has the smallest integer, and adding to it wraps round.
    """
    keeps_order = all(x.is_floating_point() or x.dtype == torch.bool for x in addends)
    return increasing((operand,)) if keeps_order else []


def maxima(*groups: Operands) -> list[Carry]:
    """Only maxima, through each group."""
    return [Carry(frozenset(group), Reduction.MAX) for group in groups]


def minima(*groups: Operands) -> list[Carry]:
    """Only minima, through each group."""
    return [Carry(frozenset(group), Reduction.MIN) for group in groups]


def products(*groups: Operands) -> list[Carry]:
    """Products, through each group."""
    return [Carry(frozenset(group), Reduction.PRODUCT) for group in groups]


def moving(*groups: Operands) -> list[Carry]:
    """All reductions but sums (`Rule.linear` has sums), through groups of operands whose elements are moved to the
    result.
    """
    return [*increasing(*groups), *products(*groups)]


def meaningful(operands: Sequence[torch.Tensor] | Mapping[int, torch.Tensor], carries: Iterable[Carry]) -> list[Carry]:
    """The carries that the operands' types allow: booleans have no product.

    The registry later removes all carries of complex numbers but sums.
    """
    known = operands if isinstance(operands, Mapping) else dict(enumerate(operands))
    return [carry for carry in carries if all(_can_await(known.get(i), carry.reduction) for i in carry.operands)]


def _can_await(operand: torch.Tensor | None, reduction: Reduction) -> bool:
    if operand is None:
        return False
    return operand.dtype != torch.bool or reduction is not Reduction.PRODUCT


def keeps_sums(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether converted addends add up to the converted sum.

    They do not where conversion rounds to integers or booleans, nor where narrow integer addends may have wrapped
    round.
    """
    if source == target:
        return True
    is_number = target.is_floating_point or target.is_complex
    return is_number and (source.is_floating_point or source.is_complex or source is torch.int64)


def through_conversion(source: torch.dtype, target: torch.dtype, operand: int) -> list[Carry]:
    """Maxima, minima and products that pass through a conversion.

    Conversion keeps the order, except to booleans (zero or not) and to integers that wrap. It keeps products, except
    from complex numbers to their real part.
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
    """Whether values may exceed an integer type's range and lose their order in the conversion."""
    if target.is_floating_point or source in (torch.bool, target):
        return False
    return source.is_floating_point or not target.is_signed or source.itemsize >= target.itemsize


def only_in(result: int, results: int, carries: Iterable[Carry]) -> list[Carry]:
    """The carries for one of several results; all other results are whole."""
    return [
        Carry(carry.operands, carry.reduction, tuple(carry.result(0) if i == result else None for i in range(results)))
        for carry in carries
    ]


def sums(*groups: Operands) -> list[Carry]:
    """Sums through each group. A rule whose results are all linear in them uses `Rule.linear` instead."""
    return [Carry(frozenset(group), Reduction.SUM) for group in groups]


@dataclass(frozen=True, slots=True)
class LinearResult:
    """The operands that one of several results depends on, and the sets of operands in which it is linear."""

    operands: frozenset[int]
    linear: tuple[frozenset[int], ...]


def linear_result(operands: Operands, *linear: Operands) -> LinearResult:
    """A result that depends on `operands` and is jointly linear in each set of `linear`."""
    return LinearResult(frozenset(operands), tuple(frozenset(group) for group in linear if group))


def sums_by_result(results: Sequence[LinearResult]) -> list[Carry]:
    """Sums through operands in which each result is linear, or on which it does not depend."""
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
