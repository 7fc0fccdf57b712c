"""A memory row gives the bytes at its point for any choice of options."""

from __future__ import annotations

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
    """For drawn items and choices, the bytes of a row equal the usage at the row's point."""
    points = data.draw(st.integers(1, 4))
    usage = MemoryUsage.of(points, data.draw(st.lists(items(points), max_size=5)))
    point = data.draw(st.integers(0, points - 1))
    row = row_at(usage, point, {pair: number for number, pair in enumerate(PAIRS)})
    for choice in data.draw(st.lists(st.tuples(*(st.integers(0, count - 1) for count in OPTIONS)), max_size=4)):
        assert row.bytes_of(choice, EDGES) == usage(choice)[point]
    assert row_at(usage, point, {}) is row


def test_rows_of_a_few_points_are_kept() -> None:
    """The rows of a few points are cached, but not those of all 40 points."""
    usage = MemoryUsage.of(40, [])
    rows = [row_at(usage, point, {}) for point in range(3)]
    assert all(row_at(usage, point, {}) is row for point, row in enumerate(rows))
    for point in range(40):
        row_at(usage, point, {})
    assert len(usage.known_rows) < 40


def test_a_row_says_nothing_of_variables_and_edges_that_hold_nothing() -> None:
    """A row has no entry for a variable or an edge without memory."""
    row = row_at(MemoryUsage.of(1, []), 0, {})
    assert row.variables.get(0) is None
    assert row.edges.get(0) is None
