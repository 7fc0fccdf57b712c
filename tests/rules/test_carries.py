"""Ways for partial values to pass through a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial

from autoshard.ir.reduction import combine
from autoshard.ir.spec import Reduction
from autoshard.rules import strategies
from autoshard.rules.carries import (
    decreasing,
    increasing,
    linear_result,
    meaningful,
    moving,
    only_in,
    scaled,
    sums,
    sums_by_result,
)
from autoshard.rules.notation import Carry
from tests.rules.recording import tensor

aten = torch.ops.aten

SUM, MAX, MIN = Reduction.SUM, Reduction.MAX, Reduction.MIN


def test_order() -> None:
    """Increasing functions keep pending maxima, and decreasing functions turn them into minima."""
    assert [(c.reduction, c.result(0)) for c in increasing((0,))] == [(MAX, MAX), (MIN, MIN)]
    assert [(c.reduction, c.result(0)) for c in decreasing((0,))] == [(MAX, MIN), (MIN, MAX)]


@pytest.mark.parametrize(("scale", "expected"), [(2.5, MAX), (-1, MIN), (0, None), (1j, None)])
def test_a_number_decides_about_order(scale: complex, expected: Reduction | None) -> None:
    """A negative factor reverses pending extremes, and zero or complex factors exclude them."""
    assert next((carry.result(0) for carry in scaled(scale, 0)), None) == expected


def test_types_decide_what_is_meaningful() -> None:
    """Booleans have no product, and absent operands await nothing."""
    carries = moving((0,))
    number = torch.zeros(2)
    assert meaningful([number], carries) == carries
    assert meaningful([number.bool()], carries) == increasing((0,))
    assert meaningful([number], increasing((1,))) == []


def test_one_of_several_results_is_concerned() -> None:
    """A pending reduction concerns one of several results, and the remaining results are whole."""
    assert only_in(1, 3, sums((2,))) == [Carry(frozenset({2}), SUM, (None, SUM, None))]


def test_sums_by_result() -> None:
    """The gradients of a b are g b and g a; a result that depends nonlinearly on an operand is left out."""
    grad, a, b = 0, 1, 2
    of_a, of_b = linear_result((grad, b), (grad,), (b,)), linear_result((grad, a), (grad,), (a,))
    found = {tuple(sorted(carry.operands)): carry.results for carry in sums_by_result([of_a, of_b])}
    assert found == {(0,): (SUM, SUM), (1,): (None, SUM), (2,): (SUM, None), (1, 2): (SUM, SUM)}
    only_grad = linear_result((grad, a, b), (grad,))
    assert [carry.operands for carry in sums_by_result([of_a, only_grad])] == [frozenset({grad})]


_X = tensor(1, 40)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.bucketize.Tensor, (_X, torch.arange(-3.0, 4.0))),
        (aten.fmax.default, (_X, _X)),
        (aten.fmin.default, (_X, _X)),
        (aten.nan_to_num.default, (_X,)),
        (aten.nansum.default, (_X, [0])),
        (aten.sign.default, (_X,)),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_nan_on_one_rank(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    """An operator may make a number of NaN; numbers of other ranks then do not hide the NaN of one rank."""
    for inputs, outputs in strategies(op, args, {}, 2):
        awaited = [index for index, place in enumerate(inputs) if isinstance(place, Partial)]
        for index in awaited if len(awaited) == 1 else ():
            on_nan, on_number = (
                op(*[value if place == index else item for place, item in enumerate(args)])
                for value in (torch.full_like(_X, float("nan")), tensor(1, 40))
            )
            assert isinstance(outputs[0], Partial)
            found = combine(Reduction(outputs[0].reduce_op), [on_nan, on_number])
            torch.testing.assert_close(found, on_nan, equal_nan=True)
