"""The marker `sample(n)`: of a test's cases `make test` runs n, `make test-all` all.

It is for cases that are combinations of models, meshes and options. Cases that each show a behaviour of their own (a
schedule, a mutation that is refused) all run.
"""

from collections import defaultdict
from collections.abc import Iterable

import pytest


def leave_out(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the cases that samples leave out; cases that are slow anyway count for none."""
    families: dict[tuple[object, str], list[tuple[pytest.Item, int]]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is not None and item.get_closest_marker("slow") is None:
            families[item.parent, item.name.partition("[")[0]].append((item, mark.args[0]))
    for family in families.values():
        kept = spread(len(family), family[0][1])
        for index, (item, _) in enumerate(family):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


def spread(cases: int, wanted: int) -> set[int]:
    """Return the indices of `wanted` cases, evenly apart, of 0 to `cases` - 1; all where no more are there."""
    return {(2 * index + 1) * cases // (2 * wanted) for index in range(wanted)} if wanted < cases else {*range(cases)}
