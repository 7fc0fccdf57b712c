"""Changes that are said to mean the same: the list stays true while the source and the tests change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import NOTICED, read_equivalent, read_outcomes
from tests.mutants.draw import Key

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("key", read_equivalent(), ids=":".join)
def test_what_means_the_same_is_noticed_by_no_test(key: Key) -> None:
    """The line is still in its file, the reason is said, and no run has found a test that fails."""
    path, _, place = key
    assert place.partition(": ")[2].rpartition(" #")[0] in (ROOT / path).read_text(encoding="utf-8")
    assert read_equivalent()[key]
    outcome = read_outcomes().get(key)
    assert outcome is None or outcome.verdict != NOTICED
