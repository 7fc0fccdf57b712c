"""The factor notation: parsing, and the sizes of factors."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard.errors import InvalidSpecError
from autoshard.rules.notation import Rule, bind, parse


def test_parse() -> None:
    """In the notation, a dim is a factor, a product of factors, or 1; operands may be scalars or absent."""
    assert parse("a (b c), scalar -> 1 a") == ((((("a",), ("b", "c")), ()), (((), ("a",)),)))
    assert parse("-> n") == ((), ((("n",),),))


def test_sizes_come_from_the_shapes() -> None:
    """The size of one factor of a product may be found from the shape, and dims of size one have no factor."""
    rule = bind(Rule("(h d) s -> s h d", sizes={"h": 2}, blocked=["d"]), [(8, 1)], [(1, 2, 4)])
    assert dict(rule.sizes) == {"h": 2, "d": 4}
    assert rule.inputs == ((("h", "d"), ()),)
    assert rule.splittable == ("h",)


def test_anonymous_factors_are_blocked() -> None:
    """Each `_` is a separate factor, which is not splittable."""
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
    """A malformed rule, or a rule that does not fit the call's shapes, raises an error with the reason."""
    with pytest.raises(InvalidSpecError, match=message):
        bind(rule, inputs, outputs)


@pytest.mark.parametrize(
    ("options", "communicates"),
    [({}, False), ({"whole": {"a": {0}}}, True), ({"exchanged": {"a": 4}}, True), ({"together": [("a", "b")]}, True)],
)
def test_each_way_to_exchange_within_a_call_counts(options: dict[str, Any], communicates: bool) -> None:
    """A rule with a local form communicates if it has a whole result, exchanged elements, or factors split together."""
    rule = bind(Rule("a b -> a b", local=lambda *_: None, **options), [(4, 2)], [(4, 2)])
    assert rule.communicates is communicates
