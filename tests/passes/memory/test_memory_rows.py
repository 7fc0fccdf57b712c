"""Memory rows are the usage at their points; of what is not known yet they count as little as can be."""

from __future__ import annotations

from functools import reduce
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from passes.memory.memory_rows import row_at
from passes.memory.memory_usage import MemoryUsage
from passes.solver.assignment import Edge
from tests.passes.memory.drawn_items import OPTIONS, items

PAIRS = list(product(range(len(OPTIONS)), repeat=2))
EDGES = [Edge(tail, head, np.zeros((OPTIONS[tail], OPTIONS[head]))) for tail, head in PAIRS]


@given(st.data())
def test_a_row_is_the_usage_at_its_point(data: st.DataObject) -> None:
    """And the row so far is no more, is as much for every choice whose usage is known, and finds nothing itself."""
    points = data.draw(st.integers(1, 4))
    drawn = data.draw(st.lists(items(points), max_size=5))
    usage = MemoryUsage.of(points, [item for item, _ in drawn])
    point = data.draw(st.integers(0, points - 1))
    row = row_at(usage, point, {pair: number for number, pair in enumerate(PAIRS)})
    assert row.so_far is not None
    choices = data.draw(st.lists(st.tuples(*(st.integers(0, count - 1) for count in OPTIONS)), min_size=1, max_size=4))
    for choice in choices:
        unknown = [np.isnan(item.table.sizes).sum() for item, _ in drawn]
        before = row.so_far.bytes_of(choice, EDGES)
        assert [np.isnan(item.table.sizes).sum() for item, _ in drawn] == unknown
        assert before <= usage(choice)[point] == row.so_far.bytes_of(choice, EDGES)
    for choice in choices:
        assert row.bytes_of(choice, EDGES) == row.so_far.bytes_of(choice, EDGES) == usage(choice)[point]
    assert row_at(usage, point, {}) is row


def test_rows_of_a_few_points_are_kept() -> None:
    """Searches ask for the same few; of many, no more are kept than fit."""
    usage = MemoryUsage.of(40, [])
    rows = [row_at(usage, point, {}) for point in range(3)]
    assert all(row_at(usage, point, {}) is row for point, row in enumerate(rows))
    for point in range(40):
        row_at(usage, point, {})
    assert len(usage.known_rows) < 40


@given(st.data())
def test_a_row_finds_the_bytes_of_options_that_are_left_alone(data: st.DataObject) -> None:
    """A row is the usage of choices among the options left, at most that of other choices, and finds no other bytes."""
    drawn = data.draw(st.lists(items(1), max_size=5))
    usage = MemoryUsage.of(1, [item for item, _ in drawn])
    row = row_at(usage, 0, {pair: number for number, pair in enumerate(PAIRS)})
    masks = [np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))) for n in OPTIONS]
    before = [np.isnan(item.table.sizes) for item, _ in drawn]
    among = row.among(masks)
    for (item, _), was_unknown in zip(drawn, before, strict=True):
        left = reduce(np.logical_and.outer, (masks[variable] for variable in item.variables))
        assert np.array_equal(np.isnan(item.table.sizes) & ~left, was_unknown & ~left)
    for choice in product(*(range(count) for count in OPTIONS)):
        is_left = all(mask[option] for mask, option in zip(masks, choice, strict=True))
        known = among.bytes_of(choice, EDGES)
        used = usage(choice)[0]
        assert known == used if is_left else known <= used


def test_a_row_says_nothing_of_variables_and_edges_that_hold_nothing() -> None:
    """Neither a row nor what is known of it so far; searches ask for the bytes of variables that may have none."""
    row = row_at(MemoryUsage.of(1, []), 0, {})
    assert row.so_far is not None
    for found in (row, row.so_far):
        assert found.variables.get(0) is None
        assert found.edges.get(0) is None
