"""A run goes on by itself where its launcher starts it again; see `tests.checkpoints.restarts`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints.restarts import campaign


@pytest.mark.slow
def test_drawn_kills(tmp_path: Path) -> None:
    """Two kills at drawn moments; the run ends with the bits of one that nobody killed."""
    assert campaign(2, seed=1, folder=tmp_path) in (1, 2)
