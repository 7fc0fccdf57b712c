"""Fewer cases and fewer examples of the long tests in `make test`.

The marker `sample(n)`: `make test` runs n of a test's cases, and `make test-all` runs all cases. The marker suits cases
that combine models, meshes and options. Cases with separate behaviours, such as schedules or refused mutations, all
run.
"""

import os
from collections import defaultdict
from collections.abc import Iterable

import pytest
from hypothesis import settings


def examples(quick: int, most: int) -> settings:
    """Return settings of a property whose examples each plan a step.

    The profile "ci" has `quick` examples, and other profiles have `most`.
    """
    return settings(max_examples=quick if os.environ.get("HYPOTHESIS_PROFILE") == "ci" else most, deadline=None)


def leave_out(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the cases of a test that are not in its sample. Cases that are already slow are not counted."""
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
    """The indices of `wanted` of 0 to `cases` - 1, evenly spaced, or all indices if there are no more."""
    return {(2 * index + 1) * cases // (2 * wanted) for index in range(wanted)} if wanted < cases else {*range(cases)}
