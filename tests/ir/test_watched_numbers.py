"""Watched numbers record the comparisons that Python makes with them."""

from __future__ import annotations

import copy
import cProfile
import math
import pickle
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from autoshard.ir.python_values import are_alike
from autoshard.ir.watched_numbers import Attribute, Watch, plain_number, unwatched, watching

INTEGERS = (*range(-2, 24), 1000)
FLOATS = (0.0, -0.0, 0.1, 0.5, 0.7, 1.0, 1.5, 2.5, 7.0, -3.25, 1e300, math.inf, -math.inf, math.nan)

# What Python does with an integer, and how many of INTEGERS besides 7 give the same conditions.
OF_INTEGERS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "nothing": (lambda step: 3, len(INTEGERS) - 1),
    "the rest": (lambda step: step % 10 == 5, 24),
    "a window": (lambda step: 5 <= step < 9, 3),
    "a value": (lambda step: step == 12, len(INTEGERS) - 2),
    "unlike a text": (lambda step: step == "7", len(INTEGERS) - 1),
    "none": (lambda step: step is None or step != None, len(INTEGERS) - 1),  # noqa: E711
    "truth": (lambda step: "a" if step else "b", len(INTEGERS) - 2),
    "not": (lambda step: not step, len(INTEGERS) - 2),
    "bits": (lambda step: bool((step >> 2) & 1), 13),
    "reflected": (lambda step: (20 - step) // 6 == 2, 5),
    "negative": (lambda step: -step < ~4 and abs(step) > +3 and 2**step > 1 and step**2 < 50, 1),
    "a tuple": (lambda step: step in (3, 9, 17), 23),
    "a set": (lambda step: step in {3, 9, 17}, 0),
    "a dict": (lambda step: {7: "a"}.get(step), 0),
    "a list": (lambda step: [4, 5, 6][step % 3], 9),
    "a slice": (lambda step: "abcdef"[: step // 4], 3),
    "a range": (lambda step: list(range(step // 4)), 3),
    "the least": (lambda step: min(step, 3) * 2, 20),
    "text": (lambda step: f"{step}".endswith("7"), 0),
    "text of a part": (lambda step: f"{step // 10}", 9),
    "old text": (lambda step: "{:d}".format(*[step // 10]), 9),
    "a type": (lambda step: isinstance(step, int) and not isinstance(step, float), len(INTEGERS) - 1),
    "the type of a power": (lambda step: isinstance(2**step, float), 24),
    "a method": (lambda step: step.bit_length(), 0),
    "no method": (lambda step: hasattr(step, "is_cuda"), len(INTEGERS) - 1),
    "a part of it": (lambda step: (step + 0).real > 3, 0),
    "an error": (lambda step: _fails(lambda: 1 / (step - 7)), 0),
    "no error": (lambda step: _fails(lambda: (1 / (step - 3), 5)[1]), len(INTEGERS) - 2),
    "no rest": (lambda step: _fails(lambda: (9 % step, 9 // (step - 1), 5)[2]), len(INTEGERS) - 3),
    "shifted": (lambda step: _fails(lambda: (1 << step, 5)[1]), len(INTEGERS) - 3),
    "a shift": (lambda step: _fails(lambda: 1 << (step - 8)), 0),
    "pairs": (lambda step: divmod(step, 4)[0] == 1, 3),
    "rounded": (lambda step: round(step, -1) == 10, 8),
    "float": (lambda step: float(step), 0),
    "a cosine": (lambda step: math.cos(step) > 0.5, 0),
    "a tensor": (lambda step: (torch.ones(2) * step).tolist(), 0),
    "a tensor behind it": (lambda step: (step - torch.ones(2)).tolist(), 0),
    "a tensor's value": (lambda step: bool(torch.tensor(5) == step), 0),
    "a filled tensor": (lambda step: torch.full((2,), step).tolist(), 0),
    "an index": (lambda step: torch.arange(9)[step % 3].item(), 9),
    "an array": (lambda step: bool((np.arange(3) * step).sum() > 3), 0),
    "a number of NumPy": (lambda step: bool(np.float64(2) * step > 3), 0),
    "a fraction": (lambda step: Fraction(1, 2) * step > 3, 0),
    "a decimal": (lambda step: _fails(lambda: Decimal(2) * int(step) > 3), 0),
    "a copy": (lambda step: copy.deepcopy({"step": copy.copy(step)}), 0),
    "pickled": (lambda step: pickle.loads(pickle.dumps(step)), 0),
    "sorted": (lambda step: sorted([3, step, 9]).index(9) == 2, 5),
}  # fmt: skip

OF_FLOATS: dict[str, Callable[[Any], Any]] = {
    "a window": lambda loss: 0.3 < loss < 0.6,
    "an integer": lambda loss: "abc"[int(loss * 2) % 3],
    "floor": lambda loss: math.floor(loss) + math.ceil(loss) + math.trunc(loss),
    "round": lambda loss: round(loss),
    "digits": lambda loss: f"{loss:.1f}",
    "truth": lambda loss: bool(loss),
    "sign": lambda loss: math.copysign(1, loss),
    "no index": lambda loss: _fails(lambda: [1, 2][loss]),
    "no number": lambda loss: loss != loss,
    "annealed": lambda loss: max(0.0, 1 - loss),
    "whole": lambda loss: loss.is_integer(),
}


def _fails(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (ArithmeticError, TypeError, ValueError) as error:
        return type(error)


def _watched(value: Any, function: Callable[[Any], Any]) -> tuple[SimpleNamespace, Watch, Any]:
    holder = SimpleNamespace(number=value)
    with watching([Attribute("", holder, "number", type(value))]) as watch:
        result = plain_number(function(holder.number))
    assert type(holder.number) is type(value)
    return holder, watch, result


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers_under_the_same_conditions_give_the_same(name: str) -> None:
    """Integers that satisfy the recorded conditions give the first call's result, and the expected number of
    integers satisfies them."""
    function, expected = OF_INTEGERS[name]
    alike = _assert_sound(7, INTEGERS, function)
    assert len(alike) - 1 == expected, alike


@pytest.mark.parametrize("value", FLOATS)
@pytest.mark.parametrize("name", OF_FLOATS)
def test_floats_under_the_same_conditions_give_the_same(name: str, value: float) -> None:
    """Floats that satisfy the recorded conditions give the first call's result or error."""
    _assert_sound(value, FLOATS, lambda number: _fails(lambda: OF_FLOATS[name](number)))


def _assert_sound(value: Any, values: tuple[Any, ...], function: Callable[[Any], Any]) -> list[Any]:
    holder, watch, result = _watched(value, function)
    assert are_alike(result, function(value))
    assert not watch.is_exhausted
    alike = []
    for other in values:
        holder.number = other
        if all(condition.holds() for condition in watch.conditions):
            assert are_alike(function(other), result), other
            alike.append(other)
    assert any(item is value for item in alike)
    return alike


def test_conditions_name_what_changed() -> None:
    """Two compared attributes form one condition, and a changed type or a deleted attribute breaks a condition."""
    holder = SimpleNamespace(step=3, warm=5, beta=0.5)
    attributes = [Attribute("net", holder, name, type(value)) for name, value in vars(holder).items()]
    with watching(attributes) as watch:
        assert holder.step < holder.warm
        assert holder.beta * 2 == 1.0
    (first, second) = watch.conditions
    holder.step, holder.warm = 9, 10
    assert first.holds()
    holder.step = 12
    assert first.changes() == ["net.step", "net.warm"]
    assert not second.changes()
    holder.beta = 0
    assert second.changes() == ["net.beta"]
    del holder.beta
    assert not second.holds()


def test_numbers_left_behind_are_plain() -> None:
    """A watched number that stays in a container, closure or attribute afterwards is plain, and in a tuple acts as
    a plain number."""
    seen: list[Any] = []
    rolled, table, kept, beside = deque([0]), {"a": 0}, set(), SimpleNamespace()
    cell = 0

    def use(step: Any) -> None:
        nonlocal cell
        seen.append(step + 1)
        rolled.append(step)
        table.update(a=step)
        table[step * 2] = 1
        kept.add(step)
        beside.step = step
        cell = step - 1
        seen.append((step,))

    _, watch, _ = _watched(4, use)
    found = [seen[0], rolled[1], table["a"], list(table)[1], *kept, beside.step, cell]
    assert found == [5, 4, 4, 8, 4, 4, 3]
    assert {type(item) for item in found} == {int}
    count = len(watch.conditions)
    assert seen[1][0] + 1 == 5
    assert len(watch.conditions) == count


class Switched:
    """A class with a number."""

    step = 3


def test_attributes_of_classes_are_watched() -> None:
    """Attributes of classes are watched, although their `vars` are read-only."""
    with watching([Attribute("Switched", Switched, "step", int)]) as watch:
        assert Switched.step > 2
    assert type(Switched.step) is int
    Switched.step = 5
    assert watch.conditions[0].holds()
    Switched.step = 1
    assert not watch.conditions[0].holds()


def _asks(step: Any) -> bool:
    return _kind(step) is int


def _kind(value: Any) -> type:
    return type(value)


def test_code_that_asks_for_types_is_found() -> None:
    """`type` of a watched number is recorded as a question for its type, and `isinstance` and `__class__` are not."""
    assert _watched(3, _asks)[1].asks_for_types
    assert not _watched(3, lambda step: isinstance(step, int) and step.__class__ is int)[1].asks_for_types
    with cProfile.Profile():  # whose place is taken
        assert _watched(3, lambda step: step)[1].asks_for_types


def test_many_conditions_and_long_expressions_are_too_much() -> None:
    """Too many conditions exhaust a watch. The value of a long expression is compared instead of its parts."""
    assert _watched(3, lambda step: [step < limit for limit in range(99)])[1].is_exhausted
    assert len(_watched(3, lambda step: [step < 5 for _ in range(99)])[1].conditions) == 1
    _, watch, _ = _watched(3, lambda step: sum([step] * 300) > 5)
    assert max(condition.expression.size for condition in watch.conditions) < 200
    assert len(_assert_sound(3, INTEGERS, lambda step: sum([step] * 300) > 5)) == 1


def test_looking_at_all_attributes_is_no_use_of_them() -> None:
    """Within `unwatched`, uses of a watched number make no condition."""

    def look(step: Any) -> str:
        with unwatched():
            return repr(step + 1)

    assert _watched(3, look)[1:] != ()
    assert not _watched(3, look)[1].conditions
