"""Bytes in use at all points, found by table lookup, equal a count item by item."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from passes.memory.liveness import Interval
from passes.memory.memory_usage import MemoryUsage, UsedBytes
from tests.passes.memory.drawn_items import OPTIONS, items


@given(st.data())
def test_usage_is_the_sum_of_what_lives(data: st.DataObject) -> None:
    """The usage at a point is the sum of all items alive there, also if items share a table."""
    points = data.draw(st.integers(1, 5))
    found = data.draw(st.lists(items(points), max_size=5))
    found += [UsedBytes(Interval(0, points - 1), item.table, item.variables) for item in found[:1]]
    usage = MemoryUsage.of(points, found)
    for _ in range(2):
        choice = [data.draw(st.integers(0, count - 1)) for count in OPTIONS]
        expected = np.zeros(points)
        for item in found:
            size = item.table[tuple(choice[variable] for variable in item.variables)]
            expected[item.interval.birth : item.interval.death + 1] += size
        assert np.array_equal(usage(choice), expected)


@given(st.data())
def test_no_choice_of_what_is_allowed_has_a_lower_peak_than_the_least(data: st.DataObject) -> None:
    """`least_peak` is at most the peak of an allowed choice, and equals it if only this choice is allowed."""
    points = data.draw(st.integers(1, 5))
    found = data.draw(st.lists(items(points), max_size=5))
    usage = MemoryUsage.of(points, found)
    choice = [data.draw(st.integers(0, count - 1)) for count in OPTIONS]
    restricted = data.draw(st.sets(st.sampled_from(range(len(OPTIONS)))))
    allowed = {variable: np.array(data.draw(masks(OPTIONS[variable], choice[variable]))) for variable in restricted}
    least = usage.least_peak(allowed)
    assert least <= usage(choice).max(initial=0.0)
    single = {variable: np.arange(count) == choice[variable] for variable, count in enumerate(OPTIONS)}
    assert usage.least_peak(single) == usage(choice).max(initial=0.0)


def masks(count: int, option: int) -> st.SearchStrategy[list[bool]]:
    """Draw masks of `count` options that allow at least the given option."""
    others = st.lists(st.booleans(), min_size=count, max_size=count)
    return others.map(lambda mask: [*mask[:option], True, *mask[option + 1 :]])
