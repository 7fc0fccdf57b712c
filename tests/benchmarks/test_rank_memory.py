"""Tests of `tests.benchmarks.rank_memory`, which run it on a small model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.benchmarks.rank_memory import Phase, measure

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peaks of resident memory are read from /proc")


def assert_within(phases: list[Phase]) -> None:
    excess = [phase for phase in phases if phase.peak_bytes > phase.allowed_bytes]
    assert not excess, "\n".join(map(str, excess))


def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    """From meta through three steps and another shape to a checkpoint and exported weights, on two ranks."""
    phases = measure("small", {"train": 2}, tmp_path)["train"]
    assert {"trace", "place", "init_weights", "step 1", "new shape", "save"} <= {phase.name for phase in phases}
    assert_within(phases)


@pytest.mark.slow
def test_no_rank_holds_the_whole_model_when_it_is_loaded(tmp_path: Path) -> None:
    """From a checkpoint of four ranks on two, and from exported weights on four."""
    for phases in measure("small", {"train": 4, "resume": 2, "begin": 4}, tmp_path).values():
        assert_within(phases)
