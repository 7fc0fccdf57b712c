"""Drawn assignments, small enough to try every choice."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from passes.solver.assignment import Assignment, Edge, MemoryRow


@st.composite
def assignments(draw: st.DrawFn, *, with_memory: bool = True) -> Assignment:
    """Draw up to six variables of up to four options, with forbidden options and pairs, and up to three memory rows."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density = draw(st.sampled_from([0.3, 0.6, 1.0]))
    costs = tuple(numbers.integers(0, 20, size).astype(float) * 1e-6 for size in sizes)
    costs = tuple(np.where(numbers.random(len(cost)) < 0.1, np.inf, cost) for cost in costs)
    edges = []
    for tail in range(len(sizes)):
        for head in range(tail):
            if numbers.random() < density:
                table = numbers.integers(0, 9, (sizes[tail], sizes[head])) * 1e-6
                table = np.where(numbers.random(table.shape) < 0.15, np.inf, table)
                edges.append(Edge(tail, head, table))
    rows = [_row(numbers, sizes, edges) for _ in range(draw(st.integers(0, 3)) if with_memory else 0)]
    limit = draw(st.sampled_from([40.0, 80.0, 120.0])) * 2**20
    return Assignment(costs, tuple(edges), tuple(rows), limit)


def _row(numbers: np.random.Generator, sizes: list[int], edges: list[Edge]) -> MemoryRow:
    variables = {v: numbers.integers(0, 30, n) * 2.0**20 for v, n in enumerate(sizes) if numbers.random() < 0.7}
    tables = {
        e: numbers.integers(0, 9, edge.cost.shape) * 2.0**20 for e, edge in enumerate(edges) if numbers.random() < 0.3
    }
    return MemoryRow(float(numbers.integers(0, 10) * 2**20), variables, tables)
