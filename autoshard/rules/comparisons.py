"""Rules of comparisons and of logical operators. Any dim may be split."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.rules.carries import decreasing, increasing, maxima, meaningful, minima
from autoshard.rules.dims import elementwise, tensors
from autoshard.rules.notation import Carry, Rule
from autoshard.rules.registry import sharding_rule

aten = torch.ops.aten


@sharding_rule(aten.ge.Scalar, aten.gt.Scalar, aten.ge.Tensor, aten.gt.Tensor)
def exceeds(x: torch.Tensor, other: Any) -> Rule:
    return _compared(x, other, [*increasing((0,)), *decreasing((1,))])


@sharding_rule(aten.le.Scalar, aten.lt.Scalar, aten.le.Tensor, aten.lt.Tensor)
def falls_below(x: torch.Tensor, other: Any) -> Rule:
    return _compared(x, other, [*decreasing((0,)), *increasing((1,))])


def _compared(x: torch.Tensor, other: Any, carries: list[Carry]) -> Rule:
    operands = tensors(x, other)
    return Rule(elementwise([operand.shape for operand in operands]), carries=meaningful(operands, carries))


@sharding_rule(aten.logical_not.default)
def logical_not(x: torch.Tensor) -> Rule:
    return Rule(elementwise([x.shape]), carries=decreasing((0,)) if x.dtype == torch.bool else ())


@sharding_rule(aten.logical_and.default, aten.bitwise_and.Tensor)
def conjunction(a: torch.Tensor, b: torch.Tensor) -> Rule:
    return _of_booleans(a, b, minima((0, 1)))


@sharding_rule(aten.logical_or.default, aten.bitwise_or.Tensor)
def disjunction(a: torch.Tensor, b: torch.Tensor) -> Rule:
    return _of_booleans(a, b, maxima((0, 1)))


def _of_booleans(a: torch.Tensor, b: torch.Tensor, together: list[Carry]) -> Rule:
    """Return the rule of a logical operator. Extremes of two booleans pass through either, or through both together."""
    are_booleans = a.dtype == b.dtype == torch.bool
    carries = [*increasing((0,), (1,)), *together] if are_booleans else ()
    return Rule(elementwise([a.shape, b.shape]), carries=carries)
