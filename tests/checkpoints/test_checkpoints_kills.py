"""A run that is killed at any moment continues from the latest complete checkpoint; see `tests.checkpoints.kills`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints.kills import campaign


def test_some_kills(tmp_path: Path) -> None:
    """Drawn moments of a run of two ranks."""
    assert campaign(3, seed=1, sizes=[2], folder=tmp_path).total() == 3


@pytest.mark.slow
def test_many_kills(tmp_path: Path) -> None:
    """Runs of two and four ranks survive sixty drawn kills, some of each kind."""
    struck = campaign(60, seed=2, sizes=[2, 4], folder=tmp_path)
    assert struck.keys() == {"loading", "saving", "renaming", "deleting"}
