"""JSON that a reader could understand in two ways is refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir.read_json import parse, read

_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**59), 2**59)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(_VALUES)
def test_what_json_writes_is_read(value: object) -> None:
    """Any value that Python writes as JSON is read equal."""
    assert parse(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1,", "it is no JSON, Expecting value: line 1 column 4"),
        ('{"a": {"b": 1, "c": 2, "b": 1}}', "'b' stands twice in one object"),
        ("{" + ",".join(f'"{number}":1' for number in range(60_000)) + ',"59999":1}', "'59999' stands twice"),
        ("[" * 100_000, "lie in each other too deeply"),
        ('{"a":' * 100_000, "lie in each other too deeply"),
        ('{"a": NaN}', "the number 'NaN' is not finite"),
        ('{"a": [-Infinity]}', "the number '-Infinity' is not finite"),
        ("1e999", "the number '1e999' is not finite"),
        ("1" + "0" * 19, "the number '10000000000000000000' is longer than 64 bits"),
        ("9" * 100_000, r"the number '9+\.\.\.9+' is longer than 64 bits"),
    ],
)
def test_what_json_leaves_open_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_a_tuple_of_one_entry_is_read() -> None:
    """A list of one entry is read as `tuple[int]` and as `tuple[int, ...]`."""
    assert read(tuple[int], [2]) == (2,)
    assert read(tuple[int, ...], [2]) == (2,)
