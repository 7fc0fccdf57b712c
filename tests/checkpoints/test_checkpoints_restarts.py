"""A run continues by itself after its launcher restarts it; see `tests.checkpoints.restarts`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints.restarts import campaign


@pytest.mark.slow
def test_drawn_kills(tmp_path: Path) -> None:
    """After two kills at drawn moments, the run ends with the bits of a run without kills."""
    assert campaign(2, seed=1, folder=tmp_path) in (1, 2)
