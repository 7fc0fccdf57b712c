"""Bytes in use at every point, looked up at once, are those of the items one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from passes.liveness import Interval
from passes.memory_usage import Item, MemoryUsage

OPTIONS = (3, 1, 4)
"""Options of each variable."""


@st.composite
def items(draw: st.DrawFn, points: int) -> Item:
    """A value or a copy, with bytes of its own or shared ones."""
    birth = draw(st.integers(0, points - 1))
    interval = Interval(birth, draw(st.integers(birth, points - 1)))
    row, column = draw(st.permutations(range(len(OPTIONS))))[:2]
    shape = draw(st.sampled_from([(OPTIONS[row],), (OPTIONS[row], OPTIONS[column])]))
    sizes = draw(st.lists(st.integers(0, 1000), min_size=12, max_size=12))
    table = np.array(sizes[: int(np.prod(shape))], dtype=np.float64).reshape(shape)
    return Item(interval, table, row, column if len(shape) == 2 else 0)


@given(st.data())
def test_usage_is_the_sum_of_what_lives(data: st.DataObject) -> None:
    """At each point the sizes of all items whose lifetime holds it; two items may share a table."""
    points = data.draw(st.integers(1, 5))
    found = data.draw(st.lists(items(points), max_size=5))
    found += [Item(Interval(0, points - 1), item.table, item.row, item.column) for item in found[:1]]
    choice = [data.draw(st.integers(0, count - 1)) for count in OPTIONS]
    expected = np.zeros(points)
    for item in found:
        place = (choice[item.row], choice[item.column])[: item.table.ndim]
        expected[item.interval.birth : item.interval.death + 1] += item.table[place]
    assert np.array_equal(MemoryUsage.of(points, found)(choice), expected)
