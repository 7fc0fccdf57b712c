"""The factor notation: parsing, and the sizes of factors."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard.errors import InvalidSpecError
from autoshard.rules.notation import Rule, bind, parse


def test_parse() -> None:
    """Dims are factors, products of factors, or one; operands may be scalars or absent."""
    assert parse("a (b c), scalar -> 1 a") == ((((("a",), ("b", "c")), ()), (((), ("a",)),)))
    assert parse("-> n") == ((), ((("n",),),))


def test_sizes_come_from_the_shapes() -> None:
    """One factor of a product may be unknown, and factors of size one vanish."""
    rule = bind(Rule("(h d) s -> s h d", sizes={"h": 2}, blocked=["d"]), [(8, 1)], [(1, 2, 4)])
    assert dict(rule.sizes) == {"h": 2, "d": 4}
    assert rule.inputs == ((("h", "d"), ()),)
    assert rule.splittable == ("h",)


def test_anonymous_factors_are_blocked() -> None:
    """Each `_` is a factor of its own."""
    rule = bind(Rule("_ a -> a _"), [(4, 2)], [(2, 3)])
    assert rule.splittable == ("a",)


@pytest.mark.parametrize(
    ("rule", "inputs", "outputs", "message"),
    [
        (Rule("a b"), [(2, 2)], [], "must have the form 'operands -> results'"),
        (Rule("a -> a"), [(2,), (2,)], [(2,)], "names 2 tensors, the call has 3"),
        (Rule("a -> a"), [(2, 2)], [(2,)], "names 1 dims where the call has shape"),
        (Rule("a -> a"), [(2,)], [(3,)], "does not fit the factors"),
        (Rule("(a b) -> (a b)"), [(4,)], [(4,)], "does not fit the factors"),
        (Rule("a b -> a"), [(2, 2)], [(2,)], "factor 'b' vanishes from result 0"),
    ],
)
def test_a_rule_that_does_not_fit_raises(
    rule: Rule, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]], message: str
) -> None:
    """A rule that does not fit raises an error with the notation and the shape."""
    with pytest.raises(InvalidSpecError, match=message):
        bind(rule, inputs, outputs)


@pytest.mark.parametrize(
    ("options", "communicates"),
    [({}, False), ({"whole": {"a": {0}}}, True), ({"exchanged": {"a": 4}}, True), ({"together": [("a", "b")]}, True)],
)
def test_each_way_to_exchange_within_a_call_counts(options: dict[str, Any], communicates: bool) -> None:
    """An exchange is a whole result, a factor with communication, or two factors on one axis."""
    rule = bind(Rule("a b -> a b", local=lambda *_: None, **options), [(4, 2)], [(4, 2)])
    assert rule.communicates is communicates
